"""Measurements against the authors' code, and of the paper's claims."""
