"""How an answer behaves: whether it refuses, whether it says what the user wants to hear, whether it keeps a rule."""
