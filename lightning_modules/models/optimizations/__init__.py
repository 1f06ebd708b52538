"""Ways to compute the same with less memory or time."""
