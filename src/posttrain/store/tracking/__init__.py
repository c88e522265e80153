"""Trackers of further packages, each imported by one module."""
