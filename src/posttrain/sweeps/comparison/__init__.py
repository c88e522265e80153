"""Compare methods under equal tuning: plan, records, runner and report."""
