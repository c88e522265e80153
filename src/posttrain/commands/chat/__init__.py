"""posttrain chat and posttrain studio."""
