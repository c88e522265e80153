"""Run directories: launch, resume, list, trace, prune and export."""
