"""Every page and picture, and nothing but pages."""
