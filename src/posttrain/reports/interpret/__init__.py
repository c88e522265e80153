"""Pages of features and of differences between models."""
