"""Tools that know nothing of models, data or training."""
