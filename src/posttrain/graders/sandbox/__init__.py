"""Killable processes for code that must not hang or harm the trainer."""
