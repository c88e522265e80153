"""The parts of a model's folder that training leaves as they were, and keys that other programs read."""
