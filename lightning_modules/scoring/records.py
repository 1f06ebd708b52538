"""Records of measurements: sums over a document, whose quotients are the results; importable without torch.

A record is one document under one model, one evaluator and one pair of thresholds. LongPPL, perplexity and bits per
byte of a document, a set or a corpus are quotients of sums over records (`summarize`), so all commands agree.
"""

import hashlib
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, overload

from lightning_modules.models.loading.provenance import Numerics, Provenance
from lightning_modules.scoring.config import KeyTokenRule
from lightning_modules.utilities.tables import read_rows, write_rows

FORMAT = "longce-records-1"

FOLDER = "documents"
"""Folder of the records of a run's evaluations, in the folder of the run."""

NOTABLE_FRACTION = 0.01
"""Fraction of tokens that share characters or cover none above which a warning reports them."""


class Sums(NamedTuple):
    """Sums over documents; log-likelihoods are negative, in nats (``nll``) or bits."""

    documents: int = 0
    without_key_tokens: int = 0  # documents
    by_characters: int = 0  # documents whose key tokens were transferred through characters
    characters: int = 0
    tokens: int = 0  # scored tokens of the model
    unscored: int = 0  # its other tokens: the first of a text, and special tokens before it
    nll: float = 0.0  # of the scored tokens
    key_tokens: int = 0  # of the model
    key_nll: float = 0.0  # of the key tokens
    soft_weight: float = 0.0  # soft influence of the evaluator; 0 if unknown
    soft_nll: float = 0.0  # of the scored tokens, weighted by the soft influence
    bytes: int = 0  # in UTF-8, from the first scored token on, without tokens that are not scored
    key_bytes: int = 0  # .. in the key spans
    key_bits: float = 0.0  # of the tokens in key spans, by the share of their bytes inside
    crossing_bits: float = 0.0  # largest error of `key_bits`: how a token's bits are divided among its bytes is unknown
    evaluator_key_tokens: int = 0  # tokens of the evaluator in the key spans; 0 if unknown
    text_tokens: int = 0  # tokens of the model without the special ones around the text
    sharing_characters: int = 0  # .. that share a character with another token
    without_characters: int = 0  # .. that cover no character
    evaluator_tokens: int = 0  # the same of the evaluator; 0 without one
    evaluator_sharing_characters: int = 0
    evaluator_without_characters: int = 0

    @property
    def longppl(self) -> float:
        """Perplexity over the key tokens; NaN without any."""
        return _exp(_divide(self.key_nll, self.key_tokens))

    @property
    def perplexity(self) -> float:
        """Perplexity over all scored tokens."""
        return _exp(_divide(self.nll, self.tokens))

    @property
    def longppl_soft(self) -> float:
        """Perplexity weighted by the evaluator's soft influence; NaN if it is unknown."""
        return _exp(_divide(self.soft_nll, self.soft_weight))

    @property
    def key_token_share(self) -> float:
        """Key tokens over scored tokens."""
        return self.key_tokens / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text, as in lm-evaluation-harness."""
        return _divide(self.nll / math.log(2), self.bytes)

    @property
    def key_bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the key spans."""
        return _divide(self.key_bits, self.key_bytes)

    @property
    def key_bits_per_byte_error(self) -> float:
        """Largest error of `key_bits_per_byte`."""
        return _divide(self.crossing_bits, self.key_bytes)

    @property
    def longppl_per_evaluator_token(self) -> float:
        """Perplexity of the key spans per key token of the evaluator.

        For a model with the evaluator's tokens it is LongPPL, apart from tokens that share a character.
        """
        return _exp(_divide(self.key_bits * math.log(2), self.evaluator_key_tokens))

    def numbers(self) -> dict[str, float]:
        """Return all numbers by their names in results, without those of an evaluator where none is known."""
        numbers = {
            "longppl": self.longppl,
            "perplexity": self.perplexity,
            "key_tokens": self.key_tokens,
            "key_token_share": self.key_token_share,
            "documents_without_key_tokens": self.without_key_tokens,
            "documents_aligned_by_characters": self.by_characters,
            "key_bits_per_byte": self.key_bits_per_byte,
            "bits_per_byte": self.bits_per_byte,
            "tokens_sharing_characters": self.sharing_characters / max(self.text_tokens, 1),
            "tokens_without_characters": self.without_characters / max(self.text_tokens, 1),
        }
        if self.evaluator_tokens:
            sharing = self.evaluator_sharing_characters / self.evaluator_tokens
            without = self.evaluator_without_characters / self.evaluator_tokens
            numbers["longppl_per_evaluator_token"] = self.longppl_per_evaluator_token
            numbers["evaluator_tokens_sharing_characters"] = sharing
            numbers["evaluator_tokens_without_characters"] = without
        if self.soft_weight:
            numbers["longppl_soft"] = self.longppl_soft
        return numbers

    def coverage_warning(self) -> str | None:
        """Return a warning if key tokens depend on many tokens that share a character or cover none."""
        odd = (self.sharing_characters + self.without_characters) / max(self.text_tokens, 1)
        of_evaluator = self.evaluator_sharing_characters + self.evaluator_without_characters
        evaluator_odd = of_evaluator / max(self.evaluator_tokens, 1)
        if not self.by_characters or max(odd, evaluator_odd) <= NOTABLE_FRACTION:
            return None
        return (
            f"{odd:.1%} of the model's tokens and {evaluator_odd:.1%} of the evaluator's share a character with another"
            " one or cover none, and key tokens were transferred as character spans, which cannot distinguish such"
            " tokens. With `key_token_rule: paper` and an evaluator that has the model's tokenizer, each token is"
            " classified separately."
        )


class Source(NamedTuple):
    """A model that scored the text, with everything that its log-likelihoods depend on, apart from rounding."""

    name: str = ""  # as given; not part of its identity
    identity: str = ""  # content of weights, config, tokenizer and code; empty for a model in training
    tokenizer: str = ""  # SHA-256
    dtype: str = ""
    attention: str = ""
    precision: str = ""
    special_tokens: bool = False  # whether its tokenizer adds them

    @property
    def provenance(self) -> Provenance:
        """Identity, tokenizer and numerics of the model."""
        return Provenance(self.identity, self.tokenizer, self.dtype, self.attention, self.precision)

    @property
    def numerics(self) -> Numerics:
        """Number formats and attention of the model."""
        return Numerics(self.dtype, self.precision, self.attention)


class Definition(NamedTuple):
    """Definition of a key token."""

    context_length: int = 0  # K, in tokens; 0 for precomputed spans
    stride: int = 0  # d, in tokens; 0 for precomputed spans
    alpha: float = 2.0  # nats
    beta: float = -2.0  # nats
    key_token_rule: KeyTokenRule = "paper"
    gamma: float = 5.0  # largest soft weight


class Record(NamedTuple):
    """A measurement of one document."""

    document: str
    text_sha256: str
    model: Source
    evaluator: Source
    definition: Definition
    alignment: str  # tokens, characters or authors (`lightning_modules.scoring.key_tokens.Alignment`)
    sums: Sums
    set: str = ""  # validation set
    stage: str = ""  # val or test; empty for a stored model
    step: int = 0  # optimizer steps
    evaluator_label: str = ""  # the user's name of the evaluator
    thresholds_label: str = ""  # the user's name of the thresholds


def add(sums: Iterable[Sums]) -> Sums:
    """Add up sums, exactly rounded: the result does not depend on their order or on the number of processes."""
    columns = zip(Sums(), *sums, strict=True)  # each begins with 0, or 0.0 for real numbers
    totals: Any = (math.fsum(column) if isinstance(column[0], float) else sum(column) for column in columns)
    return Sums(*totals)


@overload
def summarize(records: Iterable[Record]) -> Sums: ...


@overload
def summarize(records: Iterable[Record], by: str | Sequence[str]) -> dict[Any, Sums]: ...


def summarize(records: Iterable[Record], by: str | Sequence[str] = ()) -> Sums | dict[Any, Sums]:
    """Add up the sums of records.

    Args:
        records: Measurements, such as those of `longce.score`.
        by: Name of a field, such as ``document`` or ``model.name``, or several names. The result then has the sums of
            each group, by the value of the field, or the tuple of values, in the order of the records.

    Example:
        >>> def record(name: str, nll: float) -> Record:
        ...     sums = Sums(documents=1, tokens=10, nll=nll, key_tokens=2, key_nll=4.0)
        ...     return Record(name, "", Source(), Source(), Definition(), "tokens", sums)
        >>> records = [record("a.txt", 20.0), record("b.txt", 30.0)]
        >>> round(summarize(records).perplexity, 3), round(summarize(records).longppl, 3)
        (12.182, 7.389)
        >>> {name: round(sums.perplexity, 3) for name, sums in summarize(records, by="document").items()}
        {'a.txt': 7.389, 'b.txt': 20.086}
    """
    if not by:
        return add(record.sums for record in records)
    names = [by] if isinstance(by, str) else list(by)
    groups: dict[Hashable, list[Sums]] = {}
    for record in records:
        groups.setdefault(attrgetter(*names)(record), []).append(record.sums)
    return {group: add(sums) for group, sums in groups.items()}


def measured_model(record: Record) -> Source:
    """Return the model of a measurement: in a run, only some sources of a mixture may add special tokens."""
    return record.model._replace(special_tokens=False) if record.stage else record.model


def split_measurements(records: Iterable[Record]) -> list[list[Record]]:
    """Return the records of each measurement: of one model, evaluator, definition, set and step."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        about = record._replace(document="", text_sha256="", alignment="", sums=Sums(), model=measured_model(record))
        groups.setdefault(about, []).append(record)
    return list(groups.values())


def hash_texts(records: Iterable[Record]) -> str:
    """Return a hash of the texts of records, which does not depend on their order."""
    hashes = "".join(sorted(record.text_sha256 for record in records))
    return hashlib.sha256(hashes.encode()).hexdigest()[:16]


def measurement_settings(records: Sequence[Record]) -> dict[str, Any]:
    """Return the settings on which the numbers of a measurement depend, apart from the model's provenance."""
    first = records[0]
    evaluator = first.evaluator
    return {
        "texts": hash_texts(records),
        "add_special_tokens": first.model.special_tokens,
        "evaluator": evaluator.name,
        "evaluator_add_special_tokens": evaluator.special_tokens,
        **first.definition._asdict(),
        **{f"evaluator.{name}": value for name, value in evaluator.provenance._asdict().items()},
    }


# ---------------------------------------------------------------------------------------------------------------- files


def write_records(path: str | os.PathLike[str], records: Sequence[Record]) -> None:
    """Write records to a parquet file with a column for each number and name, atomically."""
    write_rows(path, records, Record, format=FORMAT)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of a file.

    Raises:
        ValueError: If the file does not hold records.
    """
    return read_rows(path, Record, format=FORMAT, contents="records (.parquet of `longce score --output`)")


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _exp(value: float) -> float:
    """Return the exponential; infinity if it exceeds float64, as for a model that has diverged."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
