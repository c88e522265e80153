"""Where batches come from: a data set or rollouts; each a function of the step."""
