"""Right or wrong: from what a model wrote and the gold answer to a verdict."""
