"""Commands about a model's files: what can be fetched, and weights in fewer bits."""
