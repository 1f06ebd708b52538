"""``longce corpus select``: documents of a corpus by their scores."""
