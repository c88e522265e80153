"""Evaluation without training: generation, measures, statistics, intervals; the plan of one and its files."""
