"""What a recipe would take on GPUs that are not here: memory and seconds by part, the schedule on a virtual clock."""
