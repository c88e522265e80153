"""Mathematical answers: extraction, parsing, equality."""
