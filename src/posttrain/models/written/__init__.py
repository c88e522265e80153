"""Model-folder parts preserved during training, plus compatibility keys."""
