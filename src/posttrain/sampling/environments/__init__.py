"""Environments and tools, which answer a model between its turns. No models here."""
