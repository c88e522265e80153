"""Pages and figures: templates sharing a shell and a style sheet, and a chart module."""
