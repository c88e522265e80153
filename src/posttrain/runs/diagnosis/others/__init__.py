"""Records of other trainers: rows of TRL and NeMo RL in one form, and the balances that they allow."""
