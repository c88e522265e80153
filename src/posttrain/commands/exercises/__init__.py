"""``posttrain exercise``: post-training functions to implement, checked against the library's implementation."""
