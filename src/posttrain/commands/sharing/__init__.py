"""Commands that write something for other people and programs."""
