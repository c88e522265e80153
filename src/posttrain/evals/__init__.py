"""Evaluation without training: generation, measures, statistics, intervals."""
