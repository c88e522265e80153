"""Sampling from a cache of pages: bounded memory, prompts shared by page, and decode steps of fixed shapes."""
