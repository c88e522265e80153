"""What training changed inside of a model: activations, sparse dictionaries, features, differences."""
