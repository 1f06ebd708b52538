"""Ranges of numbers in configs, which the parser checks."""

from jsonargparse.typing import restricted_number_type

Holdout = restricted_number_type("Holdout", int, (">=", 3))
"""One of this many documents is for validation and one for test; with 2, none is left to train on."""

LongDocumentWeight = restricted_number_type("LongDocumentWeight", float, [(">=", 1), ("<=", 1000)])
"""Number of times that a long document occurs."""

Slot = restricted_number_type("Slot", int, (">=", 4))
"""Words between events of the synthetic language: an event has up to 3, and a local word follows."""
