"""What training changed: features, activations and behaviour of two models compared."""
