"""Training: loop, optimizer step, batch sources, batch fields, checkpoints, distributed processes."""
