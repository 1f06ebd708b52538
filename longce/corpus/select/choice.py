"""Choose documents in DuckDB: by SQL conditions, by their text, by rank, and at random."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import duckdb

from longce.corpus.select.config import SelectConfig

NUMBER = "number of the document"
"""Column with the index of a row among all rows; no file has a column of this name."""

FOLDER = "folder"
"""Value of `by` that is not a column: the folder of a document's file."""

MEMORY = 500 * 1000**2
"""Minimum memory limit of the database, in bytes; the rest of its data is on disk."""

THREADS = 4
"""Maximum number of threads; DuckDB recommends about 125 MB of `MEMORY` for each."""

MEMORY_PER_ROW = 64
"""Bytes of memory per row, for many rows, because a quantile needs all values of its column in memory."""

_TYPES = {"where": "BOOLEAN", "by": "VARCHAR", "unique": "VARCHAR"}  # of other options DOUBLE


@contextmanager
def connect(rows: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a database for this number of rows, whose SQL can neither access files nor load extensions.

    Data that exceeds its memory limit is on disk, in the temporary folder of the system.
    """
    with TemporaryDirectory(prefix="longce-select-") as folder, duckdb.connect() as database:
        database.execute("SET memory_limit = ?", [f"{max(MEMORY, MEMORY_PER_ROW * rows)} B"])
        database.execute("SET temp_directory = ?", [folder])
        threads = database.execute("SELECT current_setting('threads')").fetchall()[0][0]
        database.execute("SET threads = ?", [min(threads, THREADS)])
        database.execute("SET python_enable_replacements = false")
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        yield database


def quote(column: str) -> str:
    """Return the name of a column as an SQL identifier."""
    return '"' + column.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """Return an error of DuckDB without the advice and the excerpt of SQL that follow."""
    return str(error).partition("\n")[0]


def option_expressions(config: SelectConfig) -> dict[str, str]:
    """Return the SQL expression of each option that uses columns."""
    expressions = {"where": config.where or "true", "sample_weight": config.sample_weight or "1"}
    if config.by != FOLDER:
        expressions["by"] = quote(config.by)
    if config.unique:
        expressions["unique"] = "text_hash"
    if config.top is not None or config.rank_by != SelectConfig.rank_by:
        expressions["rank_by"] = quote(config.rank_by)
    if config.sample_tokens is not None:
        expressions["sample_tokens"] = "tokens"
    return expressions


def evaluate_options(documents: duckdb.DuckDBPyRelation, config: SelectConfig) -> duckdb.DuckDBPyRelation:
    """Return the identity of each document, and the value of each option's expression in a column of its name.

    Raises:
        ValueError: If an expression, which the user writes, is not valid.
    """
    selected = [duckdb.ColumnExpression(name) for name in (NUMBER, "file", "row", "error")]
    for option, expression in option_expressions(config).items():
        wanted = _TYPES.get(option, "DOUBLE")
        try:
            # A parsed expression instead of a part of a statement, so that it cannot end the statement.
            value = duckdb.SQLExpression(expression)
            number = duckdb.ColumnExpression(NUMBER)  # beside which no aggregate is valid
            if re.search(r"\bunnest\s*\(", expression, re.IGNORECASE):
                raise ValueError("`unnest` gives several values for a document")
            types = documents.select(number, value).types
            if len(types) > 2:
                raise ValueError("it has several values for a document")
            found = str(types[1])
            if not _can_cast(found, wanted):
                raise ValueError(f"its type is {found} instead of {wanted}")
            selected.append(value.cast(wanted).alias(option))
            documents.select(selected[-1]).limit(0).fetchall()
        except (duckdb.Error, ValueError, IndexError) as error:
            names = ", ".join(quote(name) for name in documents.columns if name != NUMBER)
            reason = first_line(error)
            raise ValueError(f"`{option}` = {expression} is not valid ({reason}). The columns are {names}.") from error
    return documents.select(*selected)


def _can_cast(found: str, wanted: str) -> bool:
    """Return whether values of a type are of the wanted type, or are numbers where a number is wanted."""
    if wanted == "VARCHAR":
        return True
    if wanted == "BOOLEAN":
        return found == "BOOLEAN"
    return found not in ("BOOLEAN", "VARCHAR")


def choose_documents(database: duckdb.DuckDBPyConnection, config: SelectConfig) -> None:
    """Create the table ``chosen`` with the `NUMBER` of each row of the table ``documents`` that meets the config."""
    # Only numbers: texts, which take most of the memory, are in `documents` once.
    numbers = [option for option in option_expressions(config) if option not in ("where", "by", "unique")]
    try:
        values = evaluate_options(database.table("documents"), config).filter('"where" AND error IS NULL')
        values.project(", ".join(quote(name) for name in [NUMBER, *numbers])).create("chosen")
    except duckdb.Error as error:
        written = f"`where` = {config.where} or `sample_weight` = {config.sample_weight}"
        raise ValueError(f"{written} fails for a document ({first_line(error)}).") from error
    keep = "CREATE OR REPLACE TABLE chosen AS FROM"
    if config.where is None:
        _check_left(database, "No document has scores: the reasons are in the column `error`.")
    _check_left(database, "No document meets the conditions: relax `where`. Without it, quantiles are printed.")
    if config.unique:
        database.execute(f'{keep} chosen ANTI JOIN ({_copies_query()}) AS copies USING ("{NUMBER}")')
    if config.top is not None:
        # NaN counts as missing.
        database.execute(f"{keep} chosen WHERE NOT isnan(rank_by)")
        _check_left(database, f"No document that meets the conditions has a number in `rank_by` = {config.rank_by}.")
        count = int(config.top)
        if config.top <= 1:
            count = max(1, round(config.top * len(database.table("chosen"))))
        database.execute(f'{keep} chosen ORDER BY rank_by DESC, "{NUMBER}" LIMIT {count}')
    if config.sample is not None or config.sample_tokens is not None:
        _check_sample(database, config)
        database.execute(f"{keep} ({_sample_query(config)})")
        reason = f"No document is drawn: the first one has more than `sample_tokens` = {config.sample_tokens}."
        _check_left(database, f"{reason} Increase it, or draw from shorter documents.")


def _check_left(database: duckdb.DuckDBPyConnection, reason: str) -> None:
    if not len(database.table("chosen")):
        raise ValueError(reason)


def _copies_query() -> str:
    """Return a query of the rows of ``chosen`` whose text an earlier one has; one without a hash may be any other."""
    texts = f'documents SEMI JOIN chosen USING ("{NUMBER}") WHERE text_hash IS NOT NULL'
    # Only texts that may be equal, by a number that takes less memory, are sorted.
    repeated = f"SELECT hash(text_hash) FROM {texts} GROUP BY ALL HAVING count(*) > 1"
    place = f'row_number() OVER (PARTITION BY text_hash ORDER BY file, row, "{NUMBER}")'
    return f'SELECT "{NUMBER}" FROM {texts} AND hash(text_hash) IN ({repeated}) QUALIFY {place} > 1'


def _check_sample(database: duckdb.DuckDBPyConnection, config: SelectConfig) -> None:
    chosen = database.table("chosen")
    wrong = chosen.filter("sample_weight < 0 OR NOT isfinite(sample_weight)").project("sample_weight").fetchall()
    if wrong:
        raise ValueError(
            f"`sample_weight` = {config.sample_weight} is {wrong[0][0]:g} for a document, and negative or not finite"
            f" for {len(wrong):,} of {len(chosen):,}: use for example `greatest({config.sample_weight}, 0)`."
        )
    if not len(chosen.filter("sample_weight > 0")):
        raise ValueError(f"No document can be drawn: `sample_weight` = {config.sample_weight} is 0 or null for all.")
    if config.sample_tokens is not None:
        unknown = len(chosen.filter("sample_tokens IS NULL OR isnan(sample_tokens)"))
        if unknown:
            raise ValueError(
                f"`sample_tokens` needs the number of tokens of each document, which {unknown:,} of those that pass do"
                " not have: leave them out with `where`, for example `tokens IS NOT NULL`."
            )


def _sample_query(config: SelectConfig) -> str:
    """Return a query of the rows of ``chosen`` that are drawn at random without repetition.

    The rows arrive in the order in which they are drawn one after another, each with a probability proportional to its
    weight among those that are left (Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003). The
    random number of a document depends only on the seed, its file and its row.
    """
    # Scores in several folders may be of files of equal names, and these documents must not be drawn together.
    copy = f'row_number() OVER (PARTITION BY file, row ORDER BY "{NUMBER}")'
    # 13 hexadecimal digits, moved to the middle of their interval so that the logarithm is finite.
    digits = f"md5(concat_ws('/', {config.seed}, row, {copy}, file))[:13]"
    uniform = f"(CAST('0x' || {digits} AS BIGINT) + 0.5) / 2^52"
    limits = []
    if config.sample is not None:
        limits.append(f"row_number() OVER draws <= {config.sample}")
    if config.sample_tokens is not None:
        limits.append(f"sum(sample_tokens) OVER draws <= {config.sample_tokens}")
    return f"""
        SELECT * EXCLUDE (arrival)
        FROM (
            SELECT chosen.*, -ln({uniform}) / chosen.sample_weight AS arrival
            FROM chosen JOIN documents USING ("{NUMBER}") WHERE chosen.sample_weight > 0
        )
        WINDOW draws AS (ORDER BY arrival, "{NUMBER}" ROWS UNBOUNDED PRECEDING)
        QUALIFY {" AND ".join(limits)}"""
