"""The verified parts on plain tensors and texts, for loops of other people; no run, no recipe."""
