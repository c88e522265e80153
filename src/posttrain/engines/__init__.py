"""What samples: the contract, the scripted engine of tests, a model opened to be asked, groups of graded answers."""
