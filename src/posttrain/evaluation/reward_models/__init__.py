"""Trained reward models: loading, scoring, measures."""
