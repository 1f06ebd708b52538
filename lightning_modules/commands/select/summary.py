"""What a corpus and a choice of its documents are worth, by source: sums over any number of documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_LINES = 40  # sources in a table


class SourceSummary:
    """Counts, and means over the documents that pass, by source; correlations between rungs of a context ladder.

    Args:
        ladder: Columns with the mean benefit of pairs of rungs.
        others: Further columns to average.
    """

    def __init__(self, ladder: Sequence[str] = (), others: Sequence[str] = ()) -> None:
        self.ladder = tuple(ladder)
        self.columns = tuple(dict.fromkeys((*MEANS, *ladder, *others)))
        self._sums: dict[str, NDArray[np.float64]] = {}
        size = len(self.ladder)
        self._moments = np.zeros((5, size, size))

    def add(self, sources: pyarrow.Array, table: pyarrow.RecordBatch, mask: NDArray[np.bool_]) -> None:
        """Add documents.

        Args:
            sources: ``[n]`` names of their sources.
            table: ``[n]`` rows with the columns, and ``tokens``.
            mask: ``[n]``, which of them pass.
        """
        values = np.stack([_floats(table, name) for name in self.columns], axis=1)
        tokens = np.nan_to_num(_floats(table, "tokens"))
        known = ~np.isnan(values) & mask[:, None]
        ones = np.ones(len(mask))
        rows = np.column_stack([ones, mask, tokens, tokens * mask, np.where(known, values, 0.0), known])
        names, index = _coded(sources)
        sums = np.zeros((len(names), rows.shape[1]))
        np.add.at(sums, index, rows)
        for name, own in zip(names, sums, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + own
        self._add_moments(values, known)

    def _add_moments(self, values: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        chosen = [self.columns.index(name) for name in self.ladder]
        there = known[:, chosen].astype(np.float64)
        own = np.where(known[:, chosen], values[:, chosen], 0.0)
        parts = (there.T @ there, own.T @ there, there.T @ own, (own**2).T @ there, own.T @ own)
        self._moments += np.stack(parts) if len(chosen) else 0

    def counts(self) -> dict[str, dict[str, int]]:
        """Documents and tokens, all and those that pass, by source."""
        names = ("documents", "passing", "tokens", "passing_tokens")
        return {
            source: {name: int(value) for name, value in zip(names, sums[:4], strict=True)}
            for source, sums in self._sums.items()
        }

    def means(self) -> dict[str, dict[str, float]]:
        """Means over the documents that pass, by source and column; NaN where no document has a value."""
        return {source: self._means(sums) for source, sums in self._sums.items()}

    def total(self) -> dict[str, float]:
        """Means over the documents of all sources that pass."""
        return self._means(sum(self._sums.values(), np.zeros(4 + 2 * len(self.columns))))

    def _means(self, sums: NDArray[np.float64]) -> dict[str, float]:
        totals, counts = np.split(sums[4:], 2)
        with np.errstate(invalid="ignore"):
            return dict(zip(self.columns, (totals / counts).tolist(), strict=True))

    def correlations(self) -> NDArray[np.float64]:
        """``[m, m]`` Pearson correlations between the columns of `ladder`, over the documents that have both."""
        count, own, other, squares, products = self._moments
        with np.errstate(invalid="ignore", divide="ignore"):
            covariance = products / count - own / count * other / count
            variance = squares / count - (own / count) ** 2
            return covariance / np.sqrt(variance * variance.T)

    def report(self) -> str:
        """The tables, as text for a terminal."""
        counts, means = self.counts(), self.means()
        sources = sorted(counts, key=lambda source: (-counts[source]["passing"], source))
        total = {name: sum(each[name] for each in counts.values()) for name in next(iter(counts.values()), {})}
        lines = [["source", "documents", "pass", "tokens", "pass", *MEANS]]
        lines += [
            [source, *map(_count, counts[source].values()), *_numbers(means[source], MEANS)]
            for source in sources[:_LINES]
        ]
        if len(sources) > _LINES:
            lines.append([f"({len(sources) - _LINES} others)"])
        lines.append(["all", *map(_count, total.values()), *_numbers(self.total(), MEANS)])
        tables = [_aligned(lines)]
        if self.ladder:
            pairs = [" > ".join(name.split("_")[1:3]) for name in self.ladder]
            tables.append("\nMean benefit of a longer context, nats (documents that pass):")
            rows = [[source, *_numbers(means[source], self.ladder)] for source in sources[:_LINES]]
            tables.append(_aligned([["source", *pairs], *rows, ["all", *_numbers(self.total(), self.ladder)]]))
            tables.append("\nCorrelation between documents of these benefits:")
            matrix = [[pair, *map(_number, row)] for pair, row in zip(pairs, self.correlations().tolist(), strict=True)]
            tables.append(_aligned([["", *pairs], *matrix]))
        return "\n".join(tables) + "\n"


def _floats(table: pyarrow.RecordBatch, name: str) -> NDArray[np.float64]:
    return table.column(name).cast(pyarrow.float64()).to_numpy(zero_copy_only=False)


def _coded(sources: pyarrow.Array) -> tuple[list[str], NDArray[Any]]:
    codes = sources.dictionary_encode()
    return codes.dictionary.to_pylist(), codes.indices.to_numpy(zero_copy_only=False)


def _numbers(values: dict[str, float], names: Sequence[str]) -> list[str]:
    return [_number(values[name]) for name in names]


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4g}"


def _count(value: int) -> str:
    return f"{value:,}"


def _aligned(lines: list[list[str]]) -> str:
    """Columns as wide as they need to be: names on the left, numbers on the right; lines may end early."""
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(lines[0]))]
    aligned = []
    for name, *numbers in lines:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
        aligned.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(aligned)
