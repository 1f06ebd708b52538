"""Corpora whose documents are scored."""
