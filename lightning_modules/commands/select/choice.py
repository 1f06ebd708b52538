"""Choose documents in DuckDB: by SQL conditions, by rank, at random, and by their text."""

import duckdb
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.commands.select.config import SelectConfig
from lightning_modules.commands.select.rows import NUMBER

TEXT_HASH = "text_hash"
"""Column with the hash of a document's text."""

_RESULTS = {"where": ("BOOLEAN", "true or false"), "sample_weight": ("DOUBLE", "a number")}  # by option
_EXAMPLES = {"where": "tokens > 99 and key != 'a'", "sample_weight": "greatest(benefit_mean, 0) * tokens"}


def connect() -> duckdb.DuckDBPyConnection:
    """Return a database in memory whose SQL can neither touch files nor load extensions."""
    database = duckdb.connect()
    database.execute("SET python_enable_replacements = false")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database


def quote(column: str) -> str:
    """Return the name of a column as an SQL identifier."""
    return '"' + column.replace('"', '""') + '"'


def evaluate_sql(documents: duckdb.DuckDBPyRelation, expression: str, option: str) -> duckdb.DuckDBPyRelation:
    """Return a relation of the number of each document and the ``value`` of an SQL expression that the user wrote."""
    kind, wanted = _RESULTS[option]
    try:
        # A parsed expression instead of a part of a statement, so that nobody can end the statement.
        value = duckdb.SQLExpression(expression)
        found = documents.select(duckdb.ColumnExpression(NUMBER), value.alias("value"))
        type_name = str(found.types[1])
        if (kind == "BOOLEAN") != (type_name == "BOOLEAN") or type_name in ("VARCHAR", "NULL"):
            raise ValueError(f"its value is {type_name}, not {wanted}")
        return found.project(f'"{NUMBER}", CAST(value AS {kind}) AS value')
    except (duckdb.Error, ValueError) as error:
        columns = [name for name in documents.columns if name != NUMBER]
        names = ", ".join(f'"{name}"' if "." in name else name for name in columns)
        raise ValueError(
            f"`{option}` = '{expression}' is not valid ({error}). Write SQL such as `{_EXAMPLES[option]}` of these"
            f" columns: {names}."
        ) from error


def choose_documents(database: duckdb.DuckDBPyConnection, config: SelectConfig) -> None:
    """Create the table ``chosen`` of those rows of the table ``documents`` that meet the config, by their `NUMBER`."""
    documents = database.table("documents")
    database.execute(f'CREATE TABLE chosen AS SELECT "{NUMBER}" FROM documents WHERE error IS NULL')
    joined = f'chosen JOIN documents USING ("{NUMBER}")'
    if config.where is not None:
        _keep(database, evaluate_sql(documents, config.where, "where").filter("value"))
    if config.unique:
        # A text whose hash is not known may be any other.
        text = f'coalesce({TEXT_HASH}, CAST("{NUMBER}" AS VARCHAR))'
        firsts = f'SELECT arg_min("{NUMBER}", (file, row)) AS "{NUMBER}" FROM {joined} GROUP BY {text}'
        _keep(database, database.sql(firsts))
    if config.top is not None:
        # Of equal documents, the first ones; NaN counts as missing.
        ranked = database.sql(f'SELECT "{NUMBER}", CAST({quote(config.rank_by)} AS DOUBLE) AS rank FROM {joined}')
        ranked = ranked.filter("NOT isnan(rank)")
        count = int(config.top) if config.top > 1 else max(1, round(config.top * len(ranked)))
        _keep(database, ranked.order(f'rank DESC, "{NUMBER}"').limit(count))
    if config.sample is not None or config.sample_tokens is not None:
        tokens = "tokens" if config.sample_tokens is not None else "NULL"
        selected = database.sql(
            f'SELECT "{NUMBER}", file, row, {tokens} AS tokens FROM {joined} ORDER BY "{NUMBER}"'
        ).df()
        unknown = selected["tokens"].isna().sum() if config.sample_tokens is not None else 0
        if unknown:
            raise ValueError(
                f"`sample_tokens` needs the number of tokens of each document, which {unknown:,} of those that pass do"
                " not have: leave them out with `where`, for example `tokens IS NOT NULL`."
            )
        weights = None
        if config.sample_weight is not None:
            passing = database.sql(f'SELECT * FROM documents SEMI JOIN chosen USING ("{NUMBER}")')
            weights = sampling_weights(passing, config.sample_weight)
        amount = {"count": config.sample, "tokens": config.sample_tokens}
        drawn = selected[is_in_sample(selected, weights, **amount, seed=config.seed)]
        _keep(database, database.from_df(drawn))
    if not len(database.table("chosen")):
        raise ValueError("No document meets the conditions: relax `where`. Without it, quantiles are printed.")


def _keep(database: duckdb.DuckDBPyConnection, documents: duckdb.DuckDBPyRelation) -> None:
    """Remove all other documents from ``chosen``."""
    documents.to_view("kept")
    database.execute(f'DELETE FROM chosen WHERE "{NUMBER}" NOT IN (SELECT "{NUMBER}" FROM kept)')


def sampling_weights(documents: duckdb.DuckDBPyRelation, expression: str) -> NDArray[np.float64]:
    """Return ``[documents]`` sampling weights by a column or an SQL expression; a missing value is 0.

    Raises:
        ValueError: If a weight is negative or not finite.
    """
    weights = evaluate_sql(documents, expression, "sample_weight").order(f'"{NUMBER}"')
    values = weights.project("coalesce(value, 0.0) AS value").fetchnumpy()["value"]
    wrong = values[~np.isfinite(values) | (values < 0)]
    if len(wrong):
        raise ValueError(
            f"`sample_weight` = '{expression}' is {wrong[0]:g} for a document, and negative or not finite for"
            f" {len(wrong):,} of {len(values):,}: use for example `greatest({expression}, 0)`."
        )
    return np.asarray(values)


def is_in_sample(
    documents: pd.DataFrame,
    weights: NDArray[np.float64] | None,
    *,
    count: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> NDArray[np.bool_]:
    """Return which documents are drawn at random without repetition.

    Documents are drawn one after another, each with a probability proportional to its weight among those that are left
    (Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003), up to ``count`` documents, or until the
    next one would exceed ``tokens``. The random number of a document depends only on the seed, its file and its row.
    """
    weight = np.ones(len(documents)) if weights is None else weights
    # Scores in several folders may be of files of equal names, and these documents must not be drawn together.
    copy = documents.groupby(["file", "row"]).cumcount()
    file = documents["file"].where(copy == 0, documents["file"] + " copy " + copy.astype(str))
    places = pd.DataFrame({"file": file, "row": documents["row"]})
    hashed = pd.util.hash_pandas_object(places, index=False, hash_key=f"{seed % 10**16:016d}")
    uniform = (hashed.to_numpy() >> np.uint64(11)) * 2.0**-53  # [0, 1)
    with np.errstate(divide="ignore"):
        arrival = -np.log1p(-uniform) / weight  # of a Poisson process with this rate
    order = np.argsort(arrival, kind="stable")[: int((weight > 0).sum())][:count]
    if tokens is not None:
        order = order[np.cumsum(documents["tokens"].to_numpy()[order]) <= tokens]
    drawn = np.zeros(len(documents), dtype=bool)
    drawn[order] = True
    return drawn
