"""Sampling by a vLLM server over HTTP."""
