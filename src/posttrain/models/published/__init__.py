"""Models that are fetched by a short name, and GGUF files."""
