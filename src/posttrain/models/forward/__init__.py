"""The forward pass: packed rows in, log-probabilities, states and scores out."""
