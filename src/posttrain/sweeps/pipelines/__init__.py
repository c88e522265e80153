"""The whole of RLHF as one sweep: a start, reward models, policies, and contests of all of them."""
