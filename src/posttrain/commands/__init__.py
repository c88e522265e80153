"""Command line interface: one module per command, defining options and implementation."""
