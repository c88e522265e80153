"""Every picture: one style, one kind of panel."""
