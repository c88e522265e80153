"""A trained reward model: loaded, asked, measured."""
