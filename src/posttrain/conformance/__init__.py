"""Float64 conformance checks for any trainer: loss, advantages, scores and rows."""
