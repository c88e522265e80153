"""Objectives: pure functions of tensors that never reduce."""
