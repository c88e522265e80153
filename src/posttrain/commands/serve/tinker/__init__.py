"""Tinker protocol over HTTP: external training loops on a local model (``posttrain serve --train``)."""
