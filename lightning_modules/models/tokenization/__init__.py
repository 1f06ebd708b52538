"""Tokenizers, and the way from token ids back to text."""
