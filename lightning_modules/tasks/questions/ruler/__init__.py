"""The tasks of RULER."""
