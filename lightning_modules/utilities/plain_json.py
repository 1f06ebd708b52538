"""Conversion of values to JSON."""

import math
from typing import Any


def plain(value: Any) -> Any:
    """Convert a value for JSON: null for NaN and infinity, objects of named tuples, text for other objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
