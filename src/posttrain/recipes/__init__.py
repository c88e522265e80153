"""Strict YAML documents: a recipe's schema and files; how it is read, extended, overridden and written down."""
