"""An audit of one update: gradient and optimizer step once more, by plain code over transformers' own forward pass."""
