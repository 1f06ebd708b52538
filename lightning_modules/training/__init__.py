"""Strategies, checkpoints and export of a training run."""
