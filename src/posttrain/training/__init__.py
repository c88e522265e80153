"""Training: the loop, its step, sources of batches, batch fields, checkpoints, several processes."""
