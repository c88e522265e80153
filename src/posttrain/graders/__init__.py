"""Graders and rewards: from a response and the reference answer to a verdict or a number."""
