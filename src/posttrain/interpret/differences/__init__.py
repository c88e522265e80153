"""Comparison of two models by their activations: changed features, divergence, causal tests."""
