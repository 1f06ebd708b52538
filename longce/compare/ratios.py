"""Ratios of the numbers of two runs, over the documents that both have."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from lightning_modules.utilities.statistics import TOKENS, UNITS, Interval, paired_ratio
from longce.compare.runs import Cell, ComparedRun, has_documents

NAMES = {
    "longppl": "LongPPL",
    "longppl_per_evaluator_token": "LongPPL per evaluator token",
    "key_bits_per_byte": "key bits/byte",
    "longppl_soft": "soft LongPPL",
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
}
"""Names of metrics in tables and sentences."""

WITHOUT_TOKENS = ("longppl_per_evaluator_token", "key_bits_per_byte", "bits_per_byte")
"""Metrics by which models with different tokenizers are compared."""

OF_KEY_TOKENS = ("longppl", "key_bits_per_byte")
"""Metrics of key tokens for the verdict: the first with equal tokenizers, the other with different ones."""

OF_ALL_TOKENS = ("perplexity", "bits_per_byte")

Outcome = Literal["better", "worse", "tie", "unknown"]


class Ratio(NamedTuple):
    """A run's number over the baseline's, over the documents that both have; NaN without any."""

    cell: Cell
    run: str
    kind: str  # of `NAMES`
    value: float
    interval: Interval | None
    total: int  # documents of the one that has more
    shared: int  # .. that both have
    documents: int  # .. with units of this kind, such as key tokens; 0 if the runs have no records by document
    units: int  # tokens or bytes that the run's number is over

    @property
    def outcome(self) -> Outcome:
        """Whether the interval excludes a tie."""
        if self.value == 0:  # the baseline has diverged
            return "better"
        if self.value == math.inf:
            return "worse"
        if self.interval is None:
            return "unknown"
        low, high = self.interval
        if high < 1:
            return "better"
        return "worse" if low > 1 else "tie"

    def __str__(self) -> str:
        value = format_number(self.value)
        if self.value == 0:
            return f"{value} (infinite for the baseline)"
        if self.interval is not None:
            low, high = self.interval
            return f"{value} [{format_number(low)}, {format_number(high)}]"
        if 0 < self.value < math.inf and self.documents:
            noun = "document" if self.documents == 1 else "documents"
            return f"{value} ({self.documents} {noun}: too few)"
        return value


def measure_ratios(runs: Sequence[ComparedRun], baseline: ComparedRun, names: Mapping[Cell, str]) -> list[Ratio]:
    """Return the ratios of the last evaluations, in the order of the names of their cells."""
    found = []
    for cell in sorted(baseline.evaluations, key=lambda each: names[each]):
        reference = baseline.last(cell)[1]
        tables = {run.name: run.last(cell)[1] for run in runs if cell in run.evaluations}
        kinds = compared_kinds([reference, *tables.values()])
        for name, documents in tables.items():
            shared = shared_documents(documents, reference, kinds[:2])
            for kind in kinds:
                value, interval = paired_ratio(shared, kind)
                counted = shared[shared[UNITS[kind]] > 0]
                units = int(counted[UNITS[kind]].sum())
                total = max(len(documents), len(reference))
                number = len(counted) if has_documents(shared) else 0
                found.append(Ratio(cell, name, kind, value, interval, total, len(shared), number, units))
    return found


def compared_kinds(tables: Sequence[pd.DataFrame]) -> tuple[str, ...]:
    """Return the metrics to compare these evaluations by: others if documents of equal texts have other tokens.

    Documents are shared (`shared_documents`) if they have equal numbers of the first two units: with different
    tokenizers, the bytes of all scored tokens depend on whether a special token precedes the text.
    """
    tokens = pd.concat(tables)["tokens"]
    same_tokens = (tokens.groupby(level=0).nunique() <= 1).all()
    return tuple(TOKENS) if same_tokens else WITHOUT_TOKENS


def shared_documents(
    documents: pd.DataFrame, baseline: pd.DataFrame, kinds: Sequence[str] = tuple(TOKENS)
) -> pd.DataFrame:
    """Return the numbers of the documents that have equal texts, and equal numbers of the units of ``kinds``."""
    both = documents.merge(baseline, left_index=True, right_index=True, suffixes=("", "_baseline"))
    same = pd.Series(True, index=both.index)
    for kind in kinds:
        unit = UNITS[kind]
        same &= both[unit] == both[f"{unit}_baseline"]
    return both[same]


def format_number(value: float) -> str:
    """Return a number with three decimals, or with fewer digits if it is large or tiny; empty for NaN."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    if value < 0.01 or value >= 1e9:
        return f"{value:.2g}"
    if value < 100:
        return f"{value:.3f}"
    return f"{value:,.1f}"
