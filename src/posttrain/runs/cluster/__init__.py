"""A run whose processes a cluster places, watches and starts again."""
