"""Find the numbers and documents of two runs that can be compared."""

from collections.abc import Sequence

import pandas as pd

from lightning_modules.utilities.statistics import TOKENS, UNITS

WITHOUT_TOKENS = ("longppl_per_evaluator_token", "key_bits_per_byte", "bits_per_byte")
"""Metrics by which models with different tokenizers are compared."""


def have_same_tokens(tables: Sequence[pd.DataFrame]) -> bool:
    """Return whether the documents of equal texts have equal numbers of tokens in all tables."""
    tokens = pd.concat(tables)["tokens"]
    return bool((tokens.groupby(level=0).nunique() <= 1).all())


def compared_kinds(tables: Sequence[pd.DataFrame]) -> tuple[str, ...]:
    """Return the metrics to compare these evaluations by; the last two cover key tokens and all tokens.

    Documents are shared (`shared_documents`) if they have equal numbers of the first two units: with different
    tokenizers, the bytes of all scored tokens depend on whether a special token precedes the text.
    """
    return tuple(TOKENS) if have_same_tokens(tables) else WITHOUT_TOKENS


def shared_documents(
    documents: pd.DataFrame, baseline: pd.DataFrame, kinds: Sequence[str] = tuple(TOKENS)
) -> pd.DataFrame:
    """Return the numbers of the documents that have equal texts, and that ``kinds`` are per equally many units of."""
    both = documents.merge(baseline, left_index=True, right_index=True, suffixes=("", "_baseline"))
    same = pd.Series(True, index=both.index)
    for name in (UNITS[kind] for kind in kinds):
        same &= both[name] == both[f"{name}_baseline"]
    return both[same]
