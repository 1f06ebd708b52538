"""Tables that `longce corpus select` prints."""

import math

import duckdb
import pandas as pd

from lightning_modules.visualization.corpus import METRICS
from longce.corpus.select.choice import FOLDER, NUMBER, quote
from longce.corpus.select.config import SelectConfig
from longce.corpus.select.scores import MEANS

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_MAX_ROWS = 40  # of a table


def report(database: duckdb.DuckDBPyConnection, config: SelectConfig) -> str:
    """Format counts and means by source, and quantiles of the documents that pass."""
    source = f"coalesce(CAST({quote(config.by)} AS VARCHAR), '-')"
    if config.by == FOLDER:
        source = "coalesce(nullif(regexp_replace(file, '/?[^/]*$', ''), ''), '.')"
    is_chosen = f'"{NUMBER}" IN (SELECT "{NUMBER}" FROM chosen)'
    documents = database.sql(f'SELECT *, {source} AS "its source", {is_chosen} AS "is chosen" FROM documents')
    by_source = _summarize_by_source(documents)
    quantiles = _compute_quantiles(documents.filter('"is chosen"'), config.rank_by)
    tables = [_format_table(by_source)]
    if len(quantiles):
        tables += ["\nQuantiles of the documents that pass:", _format_table(quantiles)]
    return "\n".join(tables) + "\n"


def _summarize_by_source(documents: duckdb.DuckDBPyRelation) -> pd.DataFrame:
    """Count the documents of each source, all and chosen ones, with means of the latter; the last row is of all."""
    aggregates = ["count(*) AS documents", 'count(*) FILTER ("is chosen") AS pass']
    if "tokens" in documents.columns:
        tokens = "coalesce(sum(TRY_CAST(tokens AS BIGINT)), 0)::BIGINT"
        chosen_tokens = 'coalesce(sum(TRY_CAST(tokens AS BIGINT)) FILTER ("is chosen"), 0)::BIGINT'
        aggregates += [f"{tokens} AS tokens", f"{chosen_tokens} AS pass_tokens"]
    counts = len(aggregates)
    for name in MEANS:
        if name in documents.columns:
            number = f"TRY_CAST({name} AS DOUBLE)"
            aggregates.append(f'avg({number}) FILTER ("is chosen" AND NOT isnan({number})) AS {name}')
    aggregates.append('grouping("its source") AS "is total"')
    by_source = documents.aggregate(
        f"""coalesce("its source", 'all') AS source, {", ".join(aggregates)}""", 'GROUPING SETS (("its source"), ())'
    )
    table = by_source.order('"is total", pass DESC, source').project('* EXCLUDE ("is total")').df()
    for name in table.columns[1 : 1 + counts]:
        table[name] = table[name].map("{:,}".format)
    return table.set_index("source").rename(columns={"pass_tokens": "pass"})


def _compute_quantiles(chosen: duckdb.DuckDBPyRelation, rank_by: str) -> pd.DataFrame:
    """Return a row of quantiles for each column of numbers; NaN, and the text of another program, count as missing."""
    names = [name for name in dict.fromkeys([*METRICS, *MEANS, rank_by]) if name in chosen.columns]
    rows = {}
    for name in names:
        numbers = chosen.project(f"TRY_CAST({quote(name)} AS DOUBLE) AS value").filter("NOT isnan(value)")
        values = numbers.aggregate(f"quantile_cont(value, {list(QUANTILES)})").fetchall()[0][0]
        rows[name] = values or [math.nan] * len(QUANTILES)
    headings = [f"{probability:.0%}" for probability in QUANTILES]
    return pd.DataFrame.from_dict(rows, orient="index", columns=headings).rename_axis("column")


def _format_table(table: pd.DataFrame) -> str:
    """Format a table as text; sources in the middle are left out if there are many."""
    table = table.rename_axis(index=None, columns=table.index.name)
    return table.to_string(na_rep="-", float_format="{:.4g}".format, max_rows=_MAX_ROWS)
