"""Sampling in the trainer's process, with the trainer's own weights."""
