"""Correlate perplexities of many models with their benchmark scores."""
