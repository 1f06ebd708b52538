"""Which tokens of real text are key: their kinds, their history, and how far evaluators and settings agree.

The protocol, with hypotheses and decision rules, is in `benchmarks/real_models/PROTOCOL.md`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.real_models.texts import Text
from benchmarks.real_models.tokens import KINDS, NGRAMS, describe_tokens
from lightning_modules.scoring.key_tokens import compare_key_spans, key_spans
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.statistics import weighted_mean_interval

HISTORY = ("first use", "in the short context", "only in the far context")
"""When the word of a token was last used."""


def describe_texts(texts: Sequence[Text], scores: Mapping[str, TokenScores]) -> pd.DataFrame:
    """Return `describe_tokens` of all texts, with the columns ``text``, ``of`` (its kind) and ``history``."""
    tables = []
    for text in texts:
        table = describe_tokens(text.text, scores[text.name])
        tables.append(table.assign(text=text.name, of=text.kind))
    table = pd.concat(tables, ignore_index=True)
    table["history"] = np.select(
        [table["kind"] == "punctuation", table["distance"].isna(), table["distance"] <= table["visible"]],
        ["punctuation", HISTORY[0], HISTORY[1]],
        HISTORY[2],
    )
    return table


def describe_key_tokens(table: pd.DataFrame) -> dict[str, Any]:
    """Return the shares of key tokens and of all tokens by kind and history, and what an n-gram counter finds."""
    key = table[table["key"]]
    far = key[key["history"] == HISTORY[2]]
    return {
        "tokens": len(table),
        "key_tokens": len(key),
        "key_fraction_by_text": {kind: float(group["key"].mean()) for kind, group in table.groupby("of")},
        "kinds": {kind: _compare_share(table, table["kind"] == kind) for kind in KINDS},
        "history": {name: _compare_share(table, table["history"] == name) for name in HISTORY},
        "median_distance": float(far["distance"].median()),
        "counter": {n: _measure_counter(table, n) for n in NGRAMS},
    }


def _compare_share(table: pd.DataFrame, chosen: "pd.Series[bool]") -> dict[str, Any]:
    """Return the share of such tokens among the key tokens, with its interval over documents, and among all tokens."""
    found = table.assign(chosen=chosen & table["key"]).groupby("text").agg(found=("chosen", "sum"), key=("key", "sum"))
    found = found[found["key"] > 0]
    means, weights = (found["found"] / found["key"]).to_numpy(), found["key"].to_numpy(dtype=np.float64)
    share = float(chosen[table["key"]].mean())
    return {"key": share, "interval": weighted_mean_interval(means, weights), "all": float(chosen.mean())}


def _measure_counter(table: pd.DataFrame, n: int) -> dict[str, float]:
    """Return which fraction of the key tokens a counter of repeated n-grams finds, and of its finds is key."""
    found, key = table[f"repeat_{n}"], table["key"]
    both = int((found & key).sum())
    return {"recall": both / max(int(key.sum()), 1), "precision": both / max(int(found.sum()), 1)}


def compare_evaluators(
    texts: Sequence[Text],
    one: Mapping[str, TokenScores],
    other: Mapping[str, TokenScores],
    *,
    alpha: float = 2.0,
    other_alpha: float = 2.0,
) -> dict[str, Any]:
    """Return the Jaccard index of the key characters of two evaluators or settings: per document, and its mean."""
    found = {
        text.name: compare_key_spans(
            key_spans(one[text.name], alpha=alpha), key_spans(other[text.name], alpha=other_alpha)
        )
        for text in texts
        if text.name in one and text.name in other
    }
    values = np.array([value for value in found.values() if not math.isnan(value)])
    interval = weighted_mean_interval(values, np.ones(len(values)))
    return {"mean": float(values.mean()), "interval": interval, "documents": found}


def choose_examples(
    table: pd.DataFrame, texts: Sequence[Text], count: int = 5, before: int = 90, after: int = 20
) -> list[dict[str, Any]]:
    """Return the key token with the largest LSD of each of the first texts whose word only the far context has."""
    instructive = table[table["key"] & (table["history"] == HISTORY[2]) & (table["word"].str.len() >= 4)]
    best = instructive.sort_values("lsd", ascending=False).groupby("text", sort=False).first()
    by_name = {text.name: text for text in texts}
    examples = []
    for name, row in best.sort_values("lsd", ascending=False).head(count).iterrows():
        text, start, end = by_name[str(name)].text, int(row["start"]), int(row["end"])
        examples.append(
            {
                "text": str(name),
                "before": text[max(0, start - before) : start],
                "token": text[start:end],
                "after": text[end : end + after],
                "word": row["word"],
                "lsd": float(row["lsd"]),
                "distance": int(row["distance"]),
            }
        )
    return examples
