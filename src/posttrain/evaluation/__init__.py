"""Evaluation without training: generation, measures, statistics, win rates, reward-model measures."""

DEFAULT_BATCH = 256  # answers sampled at a time
