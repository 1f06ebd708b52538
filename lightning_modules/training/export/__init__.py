"""Trained models as folders that transformers loads: merged or adapters apart, with a model card."""
