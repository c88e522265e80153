"""The parts of a run, each built from the sections of the recipe that it reads."""
