"""Sparse autoencoders: definition, training, quality, file format."""
