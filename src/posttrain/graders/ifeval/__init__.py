"""Instructions that can be checked: the constraints of IFEval."""
