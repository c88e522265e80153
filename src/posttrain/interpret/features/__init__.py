"""Sparse-autoencoder features: descriptions and steering."""
