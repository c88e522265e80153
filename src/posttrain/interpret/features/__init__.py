"""Descriptions of the features of a sparse autoencoder, and steering by them."""
