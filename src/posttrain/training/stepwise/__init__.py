"""Training by single calls (forward and backward, optimizer step, save, load) in place of a recipe's loop."""
