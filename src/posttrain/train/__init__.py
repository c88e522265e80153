"""The loop and what it turns."""
