"""In-process sampling with the trainer's weights."""
