"""Made-up story problems, for the embedded tiny model."""
