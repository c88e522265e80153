"""Sampling: engines (native, vLLM), episodes, environments, tools, the LLM judge."""
