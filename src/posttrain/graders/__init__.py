"""Graders and rewards: compare responses with reference answers."""
