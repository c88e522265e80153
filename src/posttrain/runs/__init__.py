"""A run is a directory: made, launched, resumed, listed, traced, pruned, exported."""
