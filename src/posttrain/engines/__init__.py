"""Sampling: the interface of engines, native and vLLM, models by name, graded rollouts, the LLM judge."""
