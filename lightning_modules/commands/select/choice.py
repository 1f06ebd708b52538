"""Choose documents by SQL conditions, by rank, at random, and by their text."""

import duckdb
import numpy as np
import pandas as pd
import pyarrow
from numpy.typing import NDArray

TEXT_HASH = "text_hash"
"""Column with the hash of a document's text, which scores of earlier versions lack."""

_ROW = "row of the table"  # a name that no column has


_RESULTS = {"where": ("BOOLEAN", "true or false"), "sample_weight": ("DOUBLE", "a number")}  # by option
_EXAMPLES = {"where": "tokens > 99 and key != 'a'", "sample_weight": "greatest(benefit_mean, 0) * tokens"}


def _evaluate_sql(documents: pyarrow.Table, expression: str, option: str) -> pyarrow.Array:
    """Return the value of an SQL expression, as DuckDB reads it, for each document; it cannot read files."""
    kind, wanted = _RESULTS[option]
    numbered = documents.append_column(_ROW, pyarrow.array(np.arange(len(documents))))
    try:
        with duckdb.connect(config={"enable_external_access": False}) as database:
            database.register("documents", numbered)
            # Functions over several rows may return them in another order.
            found = database.sql(f'SELECT ({expression}) AS value, "{_ROW}" FROM documents')
            type_name = str(found.types[0])
            if (kind == "BOOLEAN") != (type_name == "BOOLEAN") or type_name in ("VARCHAR", "NULL"):
                raise ValueError(f"its value is {type_name}, not {wanted}")
            cast = found.project(f'CAST(value AS {kind}) AS value, "{_ROW}"')
            return cast.order(f'"{_ROW}"').to_arrow_table()["value"].combine_chunks()
    except (duckdb.Error, ValueError) as error:
        names = ", ".join(f'"{name}"' if "." in name else name for name in documents.column_names)
        raise ValueError(
            f"`{option}` = '{expression}' is not valid ({error}). Write SQL such as `{_EXAMPLES[option]}` of these"
            f" columns: {names}."
        ) from error


def meets_conditions(documents: pyarrow.Table, where: str) -> NDArray[np.bool_]:
    """Return which documents meet a condition in SQL; a comparison with a missing value is not met.

    Example:
        >>> meets_conditions(pyarrow.table({"tokens": [9, 99]}), "tokens > 50 and tokens = max(tokens) over ()")
        array([False,  True])
    """
    met = _evaluate_sql(documents, where, "where")
    return met.fill_null(False).to_numpy(zero_copy_only=False)


def sampling_weights(documents: pyarrow.Table, expression: str) -> NDArray[np.float64]:
    """Return the sampling weights by a column or an SQL expression; a missing value is 0.

    Raises:
        ValueError: If a weight is negative or not finite.
    """
    weights = _evaluate_sql(documents, expression, "sample_weight")
    values = weights.fill_null(0.0).to_numpy(zero_copy_only=False)
    if (wrong := ~np.isfinite(values) | (values < 0)).any():
        raise ValueError(
            f"`sample_weight` = '{expression}' is {values[wrong][0]:g} for a document, and negative or not finite for"
            f" {wrong.sum():,} of {len(values):,}: use for example `greatest({expression}, 0)`."
        )
    return values


def is_in_top(documents: pd.DataFrame, rank_by: str, top: float) -> NDArray[np.bool_]:
    """Return which documents are selected and have the largest values; of equal values, the first ones."""
    ranked = documents.loc[documents["selected"], rank_by].dropna()
    count = int(top) if top > 1 else max(1, round(top * len(ranked)))
    return documents.index.isin(ranked.nlargest(count, keep="first").index)


def is_first_of_its_text(documents: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which documents are selected and the first, by file and row, with their text."""
    selected = documents[documents["selected"]].sort_values(["file", "row"])
    return documents.index.isin(selected.index[~selected[TEXT_HASH].duplicated()])


def is_in_sample(
    documents: pd.DataFrame,
    weights: NDArray[np.float64] | None,
    *,
    count: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> NDArray[np.bool_]:
    """Return which of the selected documents are drawn at random without repetition.

    Documents are drawn one after another, each with a probability proportional to its weight among those that are left
    (Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003), up to ``count`` documents, or until the
    next one would exceed ``tokens``. The random number of a document depends only on the seed, its file and its row.
    """
    selected = documents[documents["selected"]]
    weight = np.ones(len(selected)) if weights is None else weights[documents["selected"].to_numpy()]
    hashed = pd.util.hash_pandas_object(selected[["file", "row"]], index=False, hash_key=f"{seed % 10**16:016d}")
    uniform = (hashed.to_numpy() >> np.uint64(11)) * 2.0**-53  # [0, 1)
    with np.errstate(divide="ignore"):
        arrival = -np.log1p(-uniform) / weight  # of a Poisson process with this rate
    order = np.argsort(arrival, kind="stable")[: int((weight > 0).sum())][:count]
    if tokens is not None:
        order = order[np.cumsum(selected["tokens"].to_numpy()[order]) <= tokens]
    return documents.index.isin(selected.index[order])
