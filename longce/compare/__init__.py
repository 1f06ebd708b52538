"""Compare runs of `longce fit`, and results of `longce score`."""
