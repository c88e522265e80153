"""Models next to the one that is trained: its teacher, and averages of its weights."""
