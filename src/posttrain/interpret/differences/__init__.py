"""Compare two models through activations: changed features, divergence, causal tests."""
