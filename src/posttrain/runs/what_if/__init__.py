"""Replay a run from a checkpoint exactly, with one change."""
