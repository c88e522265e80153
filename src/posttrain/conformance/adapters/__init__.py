"""Adapters that come with the package: our own objectives, and those of other trainers."""
