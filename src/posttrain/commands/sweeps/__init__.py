"""Comparisons, studies and pipelines as commands, and what is shown of them while they work and at their end."""
