"""Many runs as one question: rows x seeds, one plan, one runner, one report."""
