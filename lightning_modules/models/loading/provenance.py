"""What identifies a model in a result; importable without torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_modules.utilities.identity import shorten_hashes


class Provenance(NamedTuple):
    """Everything about a model on which its log-likelihoods of a text depend, apart from rounding.

    Attributes:
        identity: Content of weights, config, tokenizer and code, from `model_identity`.
        tokenizer: SHA-256 of the tokenizer that is used, which may be another one than the model's own.
        dtype: Dtype of the weights; ``served`` if a server has the model.
        attention: Attention implementation; ``served`` if a server has the model.
    """

    identity: str
    tokenizer: str
    dtype: str
    attention: str

    def __str__(self) -> str:
        """Return the parts that a reader compares, with short hashes."""
        tokens = f"tokenizer {self.tokenizer[:8]}" if self.tokenizer else ""
        parts = dict.fromkeys((shorten_hashes(self.identity), tokens, self.dtype, self.attention))
        return ", ".join(filter(None, parts))

    @classmethod
    def read(cls, values: Mapping[str, Any], prefix: str = "") -> "Provenance | None":
        """Return the provenance in a stored result; None if a part is missing because an older version wrote it."""
        found = [values.get(f"{prefix}{name}") for name in cls._fields]
        return None if None in found else cls(*map(str, found))


def describe_key_tokens(settings: Mapping[str, Any], evaluator: Provenance | None) -> str:
    """Format how key tokens are found: the evaluator, K, d, thresholds and rule, as far as they are known."""
    names = {"context_length": "K", "stride": "d", "alpha": "alpha", "beta": "beta", "key_token_rule": "rule"}
    numbers = [f"{short} = {settings[name]}" for name, short in names.items() if name in settings]
    about = f" ({evaluator})" if evaluator else ""
    return ", ".join([f"evaluator {settings.get('evaluator')}{about}", *numbers])
