"""A language model as a judge: what it is asked, who is asked, what it decided, and the reward that follows."""
