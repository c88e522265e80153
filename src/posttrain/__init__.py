"""posttrain: the laboratory for language-model post-training."""

__version__ = "0.2.0"
