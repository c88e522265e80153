"""Activations of models, sparse autoencoders of them, steering, and comparisons of two models."""
