"""Perplexities of many models against their benchmark scores."""
