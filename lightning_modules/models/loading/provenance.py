"""Provenance and numerics of a model in a result; importable without torch."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lightning_modules.utilities.identity import shorten_hashes

NOT_RECORDED = "not recorded"
SERVED = "served"


class Numerics(NamedTuple):
    """Number formats and attention by which a model computed log-likelihoods; numbers of others are not compared.

    Attributes:
        dtype: Dtype of the weights, or several in alphabetical order.
        precision: ``none`` if all is computed in the dtype of the weights, or the precision of a Lightning trainer.
        attention: Attention implementation.
    """

    dtype: str
    precision: str
    attention: str

    def __str__(self) -> str:
        """Return the parts, each once."""
        return ", ".join(dict.fromkeys(self))

    @property
    def is_known(self) -> bool:
        """Whether the numbers can be compared with others of the same numerics."""
        return NOT_RECORDED not in self and SERVED not in self

    @classmethod
    def read(cls, values: Mapping[str, Any], prefix: str = "") -> "Numerics":
        """Return the numerics in a stored result; an older version did not record all of them."""
        return cls(*(str(values.get(f"{prefix}{name}") or NOT_RECORDED) for name in cls._fields))


UNKNOWN = Numerics(NOT_RECORDED, NOT_RECORDED, NOT_RECORDED)


def describe_numerics(named: Iterable[tuple[str, Numerics]]) -> list[str]:
    """Return sentences on named results whose numerics are unknown, and on how their numerics differ.

    Example:
        >>> mixed = Numerics("float32", "bf16-mixed", "sdpa")
        >>> full = Numerics("float32", "32-true", "sdpa")
        >>> describe_numerics([("x", mixed), ("y", full), ("z", full)])
        ['Not compared, because their precision differs: bf16-mixed (`x`) against 32-true (`y`, `z`).']
    """
    names: dict[Numerics, list[str]] = {}
    for name, numerics in named:
        of_numerics = names.setdefault(numerics, [])
        if f"`{name}`" not in of_numerics:
            of_numerics.append(f"`{name}`")
    sentences = []
    unknown: dict[str, None] = {}
    for numerics, same in names.items():
        if not numerics.is_known:
            unknown.update(dict.fromkeys(same))
    if unknown:
        listed = ", ".join(unknown)
        sentences.append(f"The precision of {listed} is not recorded, so a difference may be due to it.")
    if len(names) > 1:
        differing = _differing_fields(names)
        sides = []
        for numerics, same in names.items():
            named_parts = ", ".join(dict.fromkeys(getattr(numerics, part) for part in differing))
            sides.append(f"{named_parts} ({', '.join(same)})")
        *others, last = differing
        what = f"{', '.join(others)} and {last} differ" if others else f"{last} differs"
        sentences.append(f"Not compared, because their {what}: {' against '.join(sides)}.")
    return sentences


def _differing_fields(found: Iterable[Numerics]) -> list[str]:
    differing = []
    for field, values in zip(Numerics._fields, zip(*found, strict=True), strict=True):
        if len(set(values)) > 1:
            differing.append(field)
    return differing


class Provenance(NamedTuple):
    """Everything about a model on which its log-likelihoods of a text depend, apart from rounding.

    Attributes:
        identity: Content of weights, config, tokenizer and code, from `model_identity`.
        tokenizer: SHA-256 of the tokenizer that is used, which may be another one than the model's own.
        dtype: Dtype of the weights; ``served`` if a server has the model.
        attention: Attention implementation, and whether the other layers are compiled; ``served`` if a server has the
            model.
        precision: ``none``, because no command that loads a model itself uses autocast; ``served`` if a server has it.
    """

    identity: str
    tokenizer: str
    dtype: str
    attention: str
    precision: str = "none"

    def __str__(self) -> str:
        """Return the parts that a reader compares, with short hashes."""
        parts = [shorten_hashes(self.identity)]
        if self.tokenizer:
            parts.append(f"tokenizer {self.tokenizer[:8]}")
        parts.append(self.dtype)
        if self.precision not in ("none", NOT_RECORDED):
            parts.append(self.precision)
        parts.append(self.attention)
        return ", ".join(filter(None, dict.fromkeys(parts)))

    @classmethod
    def read(cls, values: Mapping[str, Any], prefix: str = "") -> "Provenance | None":
        """Return the provenance in a stored result; None if a part is missing because an older version wrote it."""
        values = {f"{prefix}precision": NOT_RECORDED, **values}
        found = [values.get(f"{prefix}{name}") for name in cls._fields]
        return None if None in found else cls(*map(str, found))


def describe_key_tokens(settings: Mapping[str, Any], evaluator: Provenance | None) -> str:
    """Describe how key tokens are found: the evaluator, K, d, thresholds and rule, if they are known."""
    names = {"context_length": "K", "stride": "d", "alpha": "alpha", "beta": "beta", "key_token_rule": "rule"}
    numbers = [f"{short} = {settings[name]}" for name, short in names.items() if name in settings]
    name = f"evaluator {settings.get('evaluator')}"
    if evaluator is not None:
        name += f" ({evaluator})"
    return ", ".join([name, *numbers])
