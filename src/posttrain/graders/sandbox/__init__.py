"""Processes that can be killed, for code that must not hang or harm the trainer."""
