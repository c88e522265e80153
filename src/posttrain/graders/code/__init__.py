"""Programs that a model wrote, graded by tests that run elsewhere than the program does."""
