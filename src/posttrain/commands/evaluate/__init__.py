"""posttrain evaluate: of one model, of several, against one another."""
