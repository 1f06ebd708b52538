"""Errors that the command line explains."""


class IncompleteError(Exception):
    """Part of the work failed. The rest is kept, and the message reports what failed and what to do."""
