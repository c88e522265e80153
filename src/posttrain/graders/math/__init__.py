"""Mathematical answers: where they stand, how they are read, and whether two are equal."""
