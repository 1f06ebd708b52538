"""Metadata of a GGUF file: every value of the model and its tokenizer is used, or refused by name."""

import struct
from collections.abc import Mapping
from typing import Any, NoReturn


class Metadata:
    """Values of a file, each to be taken once; `check_all_taken` refuses the file if a value is left.

    Args:
        name: Name of the file, for errors.
        values: Values by key. Arrays of the tokenizer are replaced by their lengths, because they take seconds to read.

    Attributes:
        architecture: Name of the architecture, which begins the keys of the model; they are taken without it.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.architecture = str(values.get("general.architecture"))
        # Other keys are remarks.
        ours = (f"{self.architecture}.", "tokenizer.")
        self._left = {key: value for key, value in values.items() if key.startswith(ours)}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which must be of the type of ``default``; that value if the file lacks it."""
        value = self._left.pop(self._whole(key), default)
        if default is not None and type(value) is not type(default):
            self.refuse(key, value, f"one value of type {type(default).__name__}")
        return value

    def take_size(self, key: str, default: int | None = None) -> int:
        """Return a size of the model, which is 1 or more; the file must have it if there is no ``default``."""
        value = self.take(key, default)
        if type(value) is not int or value < 1:
            self.refuse(key, value, "one whole number of 1 or more")
        return value

    def expect(self, key: str, known: Any) -> None:
        """Take a value that is ``known`` if the file has it."""
        value = self.take(key, known)
        if value != known:
            self.refuse(key, value, str(known))

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        """Raise a ``ValueError`` for the value of a key."""
        found = f"has `{self._whole(key)}` = {value!r:.50}"
        if value is None:
            found = f"lacks `{self._whole(key)}`"
        raise ValueError(
            f"'{self.name}' {found}, but only {wanted} can be converted exactly. Use the model's folder of the Hugging"
            " Face hub instead."
        )

    def check_all_taken(self) -> None:
        """Raise a ``ValueError`` for a key that has not been taken: its effect on the model is not known."""
        for key, value in sorted(self._left.items()):
            raise ValueError(
                f"'{self.name}' has `{key}` = {value!r:.50}, whose effect on a model of architecture"
                f" '{self.architecture}' is not known, so its numbers could be wrong. Use the model's folder of the"
                " Hugging Face hub instead."
            )

    def _whole(self, key: str) -> str:
        if key.startswith("tokenizer."):
            return key
        return f"{self.architecture}.{key}"


def exact_float(value: float) -> float:
    """Return the shortest decimal number that a float32 of a file represents: 1e-06 for 9.99999997e-07."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
