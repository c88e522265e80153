"""Evaluation without training: generation, measures, statistics, win rates, reward-model measures."""
