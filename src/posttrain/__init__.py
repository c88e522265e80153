"""posttrain: the laboratory for language-model post-training."""

__version__ = "0.1.0"
