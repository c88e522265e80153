"""Held-out evaluation of a run that trains: in its own process, or in one beside it."""
