"""Summarize selected documents by source."""

from collections.abc import Sequence

import pandas as pd

MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_MAX_SOURCES = 40


def means_by_source(documents: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Compute means over the selected documents of each source; NaN where no document has a value."""
    return documents[documents["selected"]].groupby("source", observed=True)[list(columns)].mean()


def report(documents: pd.DataFrame, ladder: Sequence[str] = ()) -> str:
    """Format the tables of `longce select`.

    Args:
        documents: One row per scored document with its ``source``, whether it is ``selected``, ``tokens``, the columns
            of `MEANS` and of the ladder.
        ladder: Columns with the mean benefit of one context length over another.
    """
    passing_tokens = documents["tokens"].where(documents["selected"])
    sources = documents.assign(passing_tokens=passing_tokens).groupby("source", observed=True)
    counts = pd.DataFrame(
        {
            "documents": sources.size(),
            "pass": sources["selected"].sum(),
            "tokens": sources["tokens"].sum(),
            "passing_tokens": sources["passing_tokens"].sum(),
        }
    ).astype(int)
    counts = counts.sort_values("pass", ascending=False, kind="stable")
    columns = [*MEANS, *ladder]
    means = means_by_source(documents, columns).reindex(counts.index)
    counts.loc["all"] = counts.sum()
    means.loc["all"] = documents.loc[documents["selected"], columns].mean()
    counts = counts.map("{:,}".format).rename(columns={"passing_tokens": "pass"})
    tables = [_format(pd.concat([counts, means[list(MEANS)]], axis=1))]
    if ladder:
        pairs = [" > ".join(name.split("_")[1:3]) for name in ladder]
        benefits = means[list(ladder)].set_axis(pairs, axis=1)
        correlations = documents.loc[documents["selected"], list(ladder)].corr()
        tables += [
            "\nMean benefit of a longer context, nats (documents that pass):",
            _format(benefits),
            "\nCorrelation between documents of these benefits:",
            _format(correlations.set_axis(pairs, axis=0).set_axis(pairs, axis=1), ""),
        ]
    return "\n".join(tables) + "\n"


def _format(table: pd.DataFrame, corner: str = "source") -> str:
    """Align a table as text, without the sources after the first 40."""
    others = len(table) - 1 - _MAX_SOURCES
    if others > 0:
        table = pd.concat([table.iloc[:_MAX_SOURCES], table.iloc[-1:]])
    lines = table.rename_axis(index=None, columns=corner).to_string(na_rep="-", float_format="{:.4g}".format)
    return lines + (f"\n({others} other sources)" if others > 0 else "")
