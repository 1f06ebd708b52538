"""Metadata of a GGUF file, of which every value is used, known to be without effect, or refused by name."""

import struct
from collections.abc import Mapping
from typing import Any

_FOREIGN = ("adapter.", "clip.", "control_vector.", "diffusion.", "imatrix.datasets")
"""Beginnings of keys in files that are not language models, or in which text is generated in another way."""

_NAMELESS = "general.architecture"


class Metadata:
    """Values of a file, each to be taken once; `check_all_taken` refuses what nobody took.

    Args:
        name: Name of the file, for errors.
        values: Values by key. Arrays of the tokenizer are replaced by their lengths, because they take seconds to read.

    Attributes:
        architecture: Name of the architecture, which begins the keys of the model.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.architecture = str(values.get(_NAMELESS))
        self._left = dict(values)

    def take(self, key: str, default: Any = None, *, whole: bool = False) -> Any:
        """Return the value of a key of the architecture, or of a ``whole`` key; ``default`` if the file lacks it."""
        value = self._left.pop(key if whole else f"{self.architecture}.{key}", default)
        # A wrong type, such as one number for each layer, would be an error deep in transformers.
        if default is not None and not isinstance(value, type(default)):
            self.refuse(key, value, f"one value of type {type(default).__name__}", whole=whole)
        return value

    def take_size(self, key: str, default: int | None = None) -> int:
        """Return a size of the model, which is 1 or more; the file must have it if there is no ``default``."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, value, "one whole number of 1 or more")
        return value

    def expect(self, key: str, *known: Any, whole: bool = False) -> None:
        """Take a value that must be one of ``known``, if the file has it."""
        value = self.take(key, whole=whole)
        if value is not None and (isinstance(value, list) or not any(_same(value, each) for each in known)):
            self.refuse(key, value, " or ".join(map(str, known)), whole=whole)

    def refuse(self, key: str, value: Any, wanted: str, *, whole: bool = False) -> None:
        """Raise a ``ValueError`` for the value of a key."""
        key = key if whole else f"{self.architecture}.{key}"
        found = f"lacks `{key}`" if value is None else f"has `{key}` = {value!r:.50}"
        raise ValueError(
            f"'{self.name}' {found}, but only {wanted} can be converted exactly. Use the model's folder of the Hugging"
            " Face hub instead."
        )

    def check_all_taken(self) -> None:
        """Raise a ``ValueError`` for a key of the model or the tokenizer that has not been taken."""
        ours = (f"{self.architecture}.", "tokenizer.", *_FOREIGN)
        if left := sorted(key for key in self._left if key.startswith(ours)):
            raise ValueError(
                f"'{self.name}' has `{left[0]}` = {self._left[left[0]]!r:.50}, whose effect on a model of architecture"
                f" '{self.architecture}' is not known, so its numbers could be wrong"
                f"{f' (and {len(left) - 1} more keys)' if left[1:] else ''}. Use the model's folder of the Hugging Face"
                " hub instead."
            )


def exact_float(value: float) -> float:
    """Return the shortest decimal number that a float32 of a file represents: 1e-06 for 9.99999997e-07."""
    single = struct.unpack("<f", struct.pack("<f", value))[0]
    for digits in range(1, 10):
        short = float(f"{single:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == single:
            return short
    return single


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, float):
        value = exact_float(value)
    return isinstance(value, bool) == isinstance(known, bool) and bool(value == known)
