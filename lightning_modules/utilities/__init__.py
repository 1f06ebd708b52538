"""Utilities that do not depend on models, data or training."""
