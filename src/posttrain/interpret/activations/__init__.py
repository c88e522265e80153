"""Hidden states: where they are read, recorded, stored and loaded again."""
