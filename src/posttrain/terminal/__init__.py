"""Output for a terminal: texts and tables that no foreign text can steer, and the progress of long work."""
