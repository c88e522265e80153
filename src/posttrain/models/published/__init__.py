"""Published models available by short names, plus GGUF support."""
