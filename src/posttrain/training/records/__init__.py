"""The records of updates: what a pass computed, what was sampled or given, and how weights moved."""
