"""What samples: the contract, the scripted engine of tests, and how a group of answers is collected and graded."""
