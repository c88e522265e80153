"""Float64 checks of somebody's trainer: does it compute the loss, advantages, scores and rows that it says."""
