"""Every page and picture, and nothing but pages: templates with one shell, one chart, one style sheet."""
