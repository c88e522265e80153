"""posttrain activations, sae, features and sae-diff."""
