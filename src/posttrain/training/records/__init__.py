"""Update records: computed values, samples or data, and weight changes."""
