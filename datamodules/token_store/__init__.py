"""Tokens of a corpus on disk, tokenized once."""
