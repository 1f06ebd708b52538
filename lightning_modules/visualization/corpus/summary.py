"""Aggregate the scores of millions of documents in DuckDB."""

from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray

BINS = 40
OTHERS = "other sources"
_STEPS = 200  # of a slider
_DIGITS = 4  # significant digits of a threshold
_TAIL = 0.005  # fraction of the documents in the outermost bins of a histogram, which have no other bounds

Thresholds = list[tuple[float, int, int]]
"""Ascending thresholds, with the number of documents above each and their tokens."""

COLUMNS = (
    "key",
    "file",
    "row",
    "tokens",
    "compared_tokens",
    "key_token_ratio",
    "benefit_mean",
    "longppl",
    "perplexity",
)
"""Columns of the scores that a `CorpusSummary` needs."""


class CorpusSummary:
    """Statistics of documents by source, aggregated when they are asked for.

    Adds the column ``lsd_mass``: the sum of the long-short differences of a document's compared tokens, in nats.

    Args:
        documents: Scores with at least `COLUMNS`; a context ladder may be among the others.
        sources: Name of each document's source. Those with the fewest documents are joined as `OTHERS`.
        max_sources: Number of sources that are kept apart.
    """

    def __init__(self, documents: pyarrow.Table, sources: pyarrow.Array, *, max_sources: int = 6) -> None:
        self.ladder = [name for name in documents.column_names if name.startswith("ladder_") and name.endswith("_mean")]
        table = documents.select([*COLUMNS, *self.ladder]).append_column("source", sources)
        mass = pc.multiply(table["benefit_mean"], table["compared_tokens"])
        self._database = duckdb.connect(config={"enable_external_access": False})
        self._database.register("scores", table.append_column("lsd_mass", mass))
        largest = f"SELECT source FROM scores GROUP BY source ORDER BY count(*) DESC, source LIMIT {max_sources}"
        self._database.execute(
            f"CREATE VIEW documents AS SELECT * REPLACE (if(source IN ({largest}), source, '{OTHERS}') AS source)"
            " FROM scores"
        )

    def totals(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return documents, tokens, and the means of some columns by source, the largest source first."""
        sums = ["count(*) AS documents", "sum(tokens)::BIGINT AS sum_tokens"]
        sums += [f'avg("{name}") AS "{name}"' for name in columns]
        query = f"SELECT source, {', '.join(sums)} FROM documents"
        found = self._database.sql(f"{query} GROUP BY source ORDER BY documents DESC, source")
        return found.df().set_index("source")

    def histogram(self, column: str, *, log: bool = False) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
        """Return ``[BINS + 1]`` edges and the ``[BINS]`` documents of each source; ``log`` makes bins of equal ratio.

        The outermost bins also count the documents beyond them.
        """
        value = f'ln("{column}")' if log else f'"{column}"'
        tails = [0, 1] if log else [_TAIL, 1 - _TAIL]
        query = f"SELECT quantile_cont({value}, {tails}) FROM documents WHERE isfinite({value})"
        low, high = self._database.sql(query).fetchall()[0][0] or (0, 1)
        width = (high - low) / BINS or 1 / BINS
        number = f"least(greatest(floor(({value} - {low}) / {width}), 0), {BINS - 1})::INTEGER"
        query = f"SELECT source, {number} AS bin, count(*) FROM documents WHERE isfinite({value}) GROUP BY ALL"
        counts = {source: np.zeros(BINS, dtype=np.int64) for source in self.totals([]).index}  # in the same order
        for source, place, count in self._database.sql(query).fetchall():
            counts[source][place] = count
        edges = low + width * np.arange(BINS + 1)
        return (np.exp(edges) if log else edges).astype(np.float64), counts

    def thresholds(self, column: str) -> Thresholds:
        """Return thresholds of a column, up to its maximum, with the documents and tokens above each."""
        quantiles = np.linspace(0, 1, _STEPS + 1).tolist()
        query = f'SELECT quantile_disc("{column}", {quantiles}) FROM documents WHERE isfinite("{column}")'
        found = self._database.sql(query).fetchall()[0][0] or []
        # Rounded first: what the slider shows is what a condition with the shown number keeps.
        values = sorted({float(f"{value:.{_DIGITS}g}") for value in found})
        if not values:
            return []
        self._database.register("steps", pyarrow.table({"place": range(len(values)), "threshold": values}))
        query = (
            "SELECT place, count(*), coalesce(sum(tokens), 0)::BIGINT FROM documents ASOF JOIN steps"
            f' ON "{column}" > threshold GROUP BY ALL'
        )
        counts = np.zeros((len(values), 2), dtype=np.int64)
        for place, documents, tokens in self._database.sql(query).fetchall():
            counts[place] = documents, tokens
        above = counts[::-1].cumsum(axis=0)[::-1].tolist()
        return [(value, *pair) for value, pair in zip(values, above, strict=True)]

    def examples(self, column: str, count: int) -> dict[str, list[dict[str, Any]]]:
        """Return the documents with the largest and the smallest values of a column, and random ones."""
        tie, names = "file, row", ", ".join(f'"{name}"' for name in (*COLUMNS, "lsd_mass", "source"))
        orders = {
            "Largest": f'"{column}" DESC, {tie}',
            "Smallest": f'"{column}", {tie}',
            "Random": f"hash(file, row), {tie}",
        }
        query = f'SELECT {names} FROM documents WHERE isfinite("{column}")'
        return {
            name: self._database.sql(f"{query} ORDER BY {order} LIMIT {count}").to_arrow_table().to_pylist()
            for name, order in orders.items()
        }
