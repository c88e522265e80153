"""What a feature means: its contexts, its logits, and what it does when steered or cut out."""
