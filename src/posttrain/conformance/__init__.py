"""Whether somebody's trainer computes what it says: float64 checks of its loss, advantages, scores and rows."""
