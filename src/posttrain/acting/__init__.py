"""Conditions on which options act, declared beside the options."""
