"""Read corpora whose documents `longce predict` scores."""
