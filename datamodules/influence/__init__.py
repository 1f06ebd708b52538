"""Token weights computed before training."""
