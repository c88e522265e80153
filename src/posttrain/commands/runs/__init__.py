"""posttrain runs: list, show, compare, change, export."""
