"""Trained reward models: loading, scoring, measures, quantization."""
