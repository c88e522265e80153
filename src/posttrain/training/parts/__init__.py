"""Training run components, built from recipe sections."""
