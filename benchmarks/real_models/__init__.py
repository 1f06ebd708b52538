"""Real pretrained models of small size, and what longce measures on them."""
