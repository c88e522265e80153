"""``posttrain exercise``: functions of post-training to write, and a check against the library's own."""
