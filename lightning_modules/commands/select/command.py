"""``longce select``: select documents of a corpus by their scores."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow

from lightning_modules.commands.select.choice import TEXT_HASH, choose_documents, connect, evaluate_sql, quote
from lightning_modules.commands.select.config import SelectConfig
from lightning_modules.commands.select.output import write_documents, write_keys
from lightning_modules.commands.select.rows import NUMBER, ScoreRows
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.utilities.files import atomic_file, writable_folder
from lightning_modules.utilities.locks import exclusive
from lightning_modules.visualization.corpus import METRICS, draw_corpus

FOLDER = "folder"  # a source that is not a column: the folder of a document's file
MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_MAX_ROWS = 40  # of a table


def select(scores: str | list[str], **options: object) -> str:
    """Select documents by scores in parquet files, and return tables by source, as text.

    ``scores`` are files, folders and patterns. Options are the fields of `SelectConfig`. Failed documents never pass.
    """
    config = SelectConfig(**options)  # type: ignore[arg-type]
    paths = [scores] if isinstance(scores, str) else list(scores)
    rows = ScoreRows(paths)
    outputs = [Path(file).absolute() for file in (config.output, config.figure) if file is not None]
    for file in outputs:
        writable_folder(file.parent, remedy="Choose another file.")
    header = rows.header()
    notes = []
    for folder in sorted({shard.name.rpartition("/")[0] for shard in rows.shards}):
        complete = ScoreShards(folder).check_success()
        if header and not complete:
            notes.append(f"{folder}/{SUCCESS} is missing: not all documents are scored, or too many failed.\n")
    written = []
    with connect() as database, ExitStack() as locks:
        load_documents(database, rows, config)
        choose_documents(database, config)
        selected = database.sql(f'SELECT * FROM documents SEMI JOIN chosen USING ("{NUMBER}") ORDER BY "{NUMBER}"')
        for file in sorted(outputs):  # the locks also remove what killed runs have left
            locks.enter_context(exclusive(file))
        if config.output is not None and config.output.endswith(".txt"):
            count = write_keys(Path(config.output), selected.project("key, file, row").to_arrow_table())
            written.append(f"Written: {config.output} ({count:,} keys)\n")
        elif config.output is not None:
            count = write_documents(Path(config.output), selected.to_arrow_table(), header, config.files)
            written.append(f"Written: {config.output} ({count:,} documents)\n")
        if config.figure is not None:
            drawn = [f'"{name}"' for name in METRICS if name in selected.columns]
            values = selected.project(", ".join(drawn)).df()
            with atomic_file(Path(config.figure)) as stream:
                draw_corpus({name: values[name].to_numpy() for name in values}, stream, Path(config.figure).suffix[1:])
            written.append(f"Written: {config.figure}\n")
        tables = report(database, config)
    return "\n".join(["".join(notes), tables, "".join(written)]).strip("\n") + "\n"


def load_documents(database: duckdb.DuckDBPyConnection, rows: ScoreRows, config: SelectConfig) -> None:
    """Create the table ``documents`` with the needed columns, after all options are checked against an empty one.

    All columns but per-token values are needed if documents are written, or else those that are used.
    """
    required = _check_columns(rows, config)
    if config.figure is not None and not set(METRICS) & set(rows.columns):
        raise ValueError(f"`figure` needs one of the columns {', '.join(METRICS)}, but none is there: leave it out.")
    columns = rows.columns
    if config.output is None or config.output.endswith(".txt"):
        sql = f"{config.where} {config.sample_weight}".lower()  # SQL ignores case
        needed = {"key", "error", "tokens", *MEANS, *METRICS, config.rank_by, *required}
        columns = [name for name in columns if name in needed or name.lower() in sql or name.startswith("ladder_")]
    # Rows of other programs have neither of these.
    absent = {"error": "NULL::VARCHAR", "key": "file || ':' || row"}
    extra = "".join(f", {value} AS {name}" for name, value in absent.items() if name not in columns)
    create = f"CREATE OR REPLACE TABLE documents AS SELECT *{extra} FROM scores"
    reader = rows.read(columns)
    database.register("scores", reader.schema.empty_table())
    database.execute(create)
    for option, expression in (("where", config.where), ("sample_weight", config.sample_weight)):
        if expression is not None:
            evaluate_sql(database.table("documents"), expression, option)
    database.register("scores", reader)
    try:
        database.execute(create)
        database.unregister("scores")  # it can be read only once
    except duckdb.InvalidInputException as error:  # raised while batches are read, with a traceback in its text
        reason = str(error).partition(" Detail: ")[0].partition("Invalid: ")[2]
        raise ValueError(reason or str(error)) from error


def _check_columns(rows: ScoreRows, config: SelectConfig) -> list[str]:
    """Return the columns that options need, or raise a ``ValueError`` for one that is missing or of the wrong type."""
    required = {}
    if config.top is not None or config.rank_by != SelectConfig.rank_by:
        required["rank_by"] = config.rank_by
    if config.by not in (FOLDER, "file"):
        required["by"] = config.by
    if config.unique:
        required["unique"] = TEXT_HASH
    if config.sample_tokens is not None:
        required["sample_tokens"] = "tokens"
    for option, column in required.items():
        if column not in rows.columns:
            raise ValueError(f"`{option}` needs a column '{column}', but the columns are {', '.join(rows.columns)}.")
        kind = rows.schema.field(column).type
        is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
        if pyarrow.types.is_nested(kind) or (option == "rank_by" and not is_number):
            raise ValueError(f"`{option}` cannot be the column '{column}', whose type is {kind}.")
    return list(required.values())


def report(database: duckdb.DuckDBPyConnection, config: SelectConfig) -> str:
    """Format the tables of `longce select`: counts and means by source, quantiles, and the context ladder."""
    columns = database.table("documents").columns
    source = f"coalesce(CAST({quote(config.by)} AS VARCHAR), '-')"
    if config.by == FOLDER:
        source = "coalesce(nullif(regexp_replace(file, '/?[^/]*$', ''), ''), '.')"
    is_chosen = f'"{NUMBER}" IN (SELECT "{NUMBER}" FROM chosen)'
    documents = database.sql(f'SELECT *, {source} AS "its source", {is_chosen} AS "is chosen" FROM documents')
    documents.to_view("with_source")
    # 1. Counts of all documents and of those that are chosen, whose means follow.
    means = [name for name in MEANS if name in columns]
    counts = {"documents": "count(*)", "pass": 'count(*) FILTER ("is chosen")'}
    if "tokens" in columns:
        counts["tokens"] = "coalesce(sum(tokens), 0)::BIGINT"
        counts["pass_tokens"] = 'coalesce(sum(tokens) FILTER ("is chosen"), 0)::BIGINT'
    table = _by_source(database, counts, means)
    for name in counts:
        table[name] = table[name].map("{:,}".format)
    tables = [_format_table(table.rename(columns={"pass_tokens": "pass"}))]
    # 2. Quantiles of the chosen documents.
    chosen = documents.filter('"is chosen"')
    ranked = [name for name in dict.fromkeys([*METRICS, *MEANS, config.rank_by]) if name in columns]
    if ranked:
        probabilities = list(QUANTILES)
        # NaN counts as missing, and so does the text in a column of another program.
        numbers = chosen.project(", ".join(f"TRY_CAST({quote(name)} AS DOUBLE) AS {quote(name)}" for name in ranked))
        quantiles = numbers.aggregate(
            ", ".join(
                f"quantile_cont({name}, {probabilities}) FILTER (NOT isnan({name})) AS {name}"
                for name in map(quote, ranked)
            )
        )
        values = dict(zip(quantiles.columns, quantiles.fetchall()[0], strict=True))
        rows = {name: values[name] or [math.nan] * len(QUANTILES) for name in ranked}
        headings = [f"{probability:.0%}" for probability in QUANTILES]
        tables.append("\nQuantiles of the documents that pass:")
        tables.append(_format_table(pd.DataFrame.from_dict(rows, orient="index", columns=headings), "column"))
    # 3. Mean benefits of a longer context over a shorter one.
    ladder = [name for name in columns if name.startswith("ladder_") and name.endswith("_mean")]
    if ladder:
        pairs = {name: " > ".join(name.split("_")[1:3]) for name in ladder}
        correlations = chosen.project(", ".join(f'"{name}"' for name in ladder)).df().corr()
        tables += [
            "\nMean benefit of a longer context, nats (documents that pass):",
            _format_table(_by_source(database, {}, ladder).rename(columns=pairs)),
            "\nCorrelation of these benefits over documents:",
            _format_table(correlations.rename(index=pairs, columns=pairs), ""),
        ]
    return "\n".join(tables) + "\n"


def _by_source(database: duckdb.DuckDBPyConnection, counts: Mapping[str, str], means: Sequence[str]) -> pd.DataFrame:
    """Return SQL aggregates and means of the chosen documents by source, and of all sources in the last row."""
    aggregates = [f'{sql} AS "{name}"' for name, sql in counts.items()]
    for name in means:
        number = f"TRY_CAST({quote(name)} AS DOUBLE)"
        aggregates.append(f'avg({number}) FILTER ("is chosen" AND NOT isnan({number})) AS {quote(name)}')
    table = database.sql(
        f"""SELECT coalesce("its source", 'all') AS source, {", ".join(aggregates)} FROM with_source
        GROUP BY GROUPING SETS (("its source"), ())
        ORDER BY grouping("its source"), count(*) FILTER ("is chosen") DESC, "its source\""""
    )
    return table.df().set_index("source")


def _format_table(table: pd.DataFrame, corner: str = "source") -> str:
    """Format a table as text; sources in the middle are left out if there are many."""
    table = table.rename_axis(index=None, columns=corner)
    return table.to_string(na_rep="-", float_format="{:.4g}".format, max_rows=_MAX_ROWS)
