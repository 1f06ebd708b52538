"""Documents packed into sequences."""
