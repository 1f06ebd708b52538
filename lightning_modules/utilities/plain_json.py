"""JSON files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lightning_modules.utilities.files import write_atomically


def plain(value: Any) -> Any:
    """Convert a value for JSON: null for NaN and infinity, objects of named tuples, text for other objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, with null for numbers that are not finite."""
    write_atomically(path, (json.dumps(plain(content), indent=1) + "\n").encode())
