"""Bundled adapters: posttrain's own objectives, and other trainers."""
