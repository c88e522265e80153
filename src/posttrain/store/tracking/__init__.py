"""Trackers of further packages, each imported by one module, and the report on a machine."""
