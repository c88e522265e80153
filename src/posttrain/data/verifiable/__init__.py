"""Tasks whose answers a grader can check."""
