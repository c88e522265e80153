"""Tasks of answers that people or models preferred."""
