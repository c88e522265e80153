"""Step-by-step training calls (forward and backward, optimizer step, save, load) instead of a recipe loop."""
