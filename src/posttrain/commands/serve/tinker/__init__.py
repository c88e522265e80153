"""Tinker's protocol over HTTP: training loops of others on a model of this machine (``posttrain serve --train``)."""
