"""Sweeps: train several methods with several seeds, and compare the results."""
