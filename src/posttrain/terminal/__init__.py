"""Terminal output: escape-safe texts and tables, and progress displays."""
