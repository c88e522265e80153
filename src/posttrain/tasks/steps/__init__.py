"""Tasks of solutions whose steps, or whose outcome, someone has judged."""
