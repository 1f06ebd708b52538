"""Scores of the documents of a corpus: columns, files and reports of failures."""
