"""Scores of the documents of a corpus: their columns, their files, and what is known of failures."""
