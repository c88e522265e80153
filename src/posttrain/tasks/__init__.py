"""From rows of data to examples: the machinery that every task uses; the tasks are in folders by family."""
