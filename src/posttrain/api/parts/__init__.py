"""Verified objectives, advantages, aggregations and graders for custom training loops. Needs neither run nor recipe."""
