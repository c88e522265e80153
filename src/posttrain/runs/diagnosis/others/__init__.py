"""Records from TRL and NeMo RL in a common form, and the balances that they support."""
