"""HTML page of the scores of a corpus."""
