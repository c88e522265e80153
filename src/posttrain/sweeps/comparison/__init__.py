"""Comparisons of methods that are tuned alike: what is trained, what is recorded, and what separates."""
