"""Activations, sparse autoencoders, steering, and model comparison."""
