"""Conditions under which options take effect, declared on the options."""
