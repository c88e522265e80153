"""Many runs as one question: comparisons and studies, their cells, parts, results and statistics."""
