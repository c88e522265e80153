"""Made-up problems, for the embedded tiny model, and prompts of environments."""
