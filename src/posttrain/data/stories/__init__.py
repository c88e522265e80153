"""Made-up problems, for the embedded tiny model."""
