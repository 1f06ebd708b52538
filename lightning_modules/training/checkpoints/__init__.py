"""Checkpoints: atomic writes, checks and resuming."""
