"""Grade model-written programs using tests that run in a separate sandbox."""
