"""Conditions on which options act, declared at the options."""
