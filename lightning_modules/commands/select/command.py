"""``longce select``: select documents of a corpus by their scores, and compute weights of their sources."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.compute as pc

from lightning_modules.commands.select.choice import (
    TEXT_HASH,
    is_first_of_its_text,
    is_in_sample,
    is_in_top,
    meets_conditions,
    sampling_weights,
)
from lightning_modules.commands.select.config import SelectConfig
from lightning_modules.commands.select.output import write_documents, write_keys, write_mixture, write_weights
from lightning_modules.scoring.corpus.shards import PER_TOKEN, SUCCESS, ScoreShards
from lightning_modules.utilities.files import writable_folder, write_atomically
from lightning_modules.utilities.locks import exclusive
from lightning_modules.visualization.corpus.page import FIRST_WORDS, corpus_page, is_ladder_mean, source_names

FOLDER = "folder"  # a source that is not a column: the folder of a document's file
MEANS = ("key_token_ratio", "benefit_mean", "benefit_positive", "longppl", "perplexity")
_MAX_ROWS = 40  # of a table


def select(scores: str, **options: object) -> str:
    """Select documents by the scores that `longce predict` wrote, and return tables by source, as text.

    Options are the fields of `SelectConfig`. Failed documents never pass.
    """
    config = SelectConfig(**options)  # type: ignore[arg-type]
    shards = ScoreShards(scores)
    header = shards.header()  # raises an error for other parquet files
    complete = shards.check_success()
    _check_options(shards, config)
    files = {Path(file).absolute() for file in (config.output, config.weights, config.mixture, config.page) if file}
    for file in files:
        writable_folder(file.parent, remedy="Choose another file.")
    table = _read_scores(shards, config)
    documents = _choose_documents(table, config)
    selected = documents[documents["selected"]]

    written: list[str] = []
    with ExitStack() as locks:
        for file in sorted(files):  # the locks also remove what killed runs have left
            locks.enter_context(exclusive(file))
        if config.output is not None and config.output.endswith(".txt"):
            count = write_keys(Path(config.output), selected)
            written.append(f"{config.output} ({count:,} keys)")
        elif config.output is not None:
            chosen = table.filter(documents["selected"].to_numpy())
            write_documents(Path(config.output), chosen, shards, config.files)
            written.append(f"{config.output} ({len(chosen):,} documents)")
        if config.weights is not None:
            means = means_by_source(documents, [config.rank_by])[config.rank_by]
            write_weights(Path(config.weights), means)
            written.append(f"{config.weights} (weights of {len(means):,} sources)")
        if config.mixture is not None:
            write_mixture(Path(config.mixture), selected, Path(str(config.output)), config.by)
            written.append(f"{config.mixture} (mixture of {selected['source'].nunique():,} sources)")
        if config.page is not None:
            folder = Path(config.page).parent
            page = corpus_page(selected, header, scores, folder=folder, conditions=config.where)
            write_atomically(Path(config.page), page.encode())
            written.append(f"{config.page} (page of {len(selected):,} documents)")
    note = f"{SUCCESS} is missing: not all documents of the corpus are scored, or too many failed.\n\n"
    files_written = "".join(f"Written: {file}\n" for file in written)
    return ("" if complete else note) + report(documents) + (f"\n{files_written}" if written else "")


def _check_options(shards: ScoreShards, config: SelectConfig) -> None:
    """Refuse options that do not fit these scores, before any are read."""
    schema = shards.schema()
    shards.schema([config.rank_by, *([] if config.by == FOLDER else [config.by])])  # raises an error for other columns
    kind = schema.field(config.rank_by).type
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ValueError(f"`rank_by` must be a numeric column, but '{config.rank_by}' has type {kind}.")
    kind = pyarrow.string() if config.by == FOLDER else schema.field(config.by).type
    names_sources = config.by != FOLDER and pyarrow.types.is_string(kind)
    if pyarrow.types.is_nested(kind) or (config.mixture is not None and not names_sources):
        raise ValueError(
            f"`by` must be a column that names sources, for `mixture` one of text, but is '{config.by}' of type {kind}."
        )
    if (config.unique or config.mixture is not None) and TEXT_HASH not in schema.names:
        option = "unique" if config.unique else "mixture"
        raise ValueError(f"`{option}` needs the column `{TEXT_HASH}`, which these scores lack: score the corpus again.")
    empty = shards.schema(_list_columns(shards)).empty_table()
    if config.where is not None:
        meets_conditions(empty, config.where)
    if config.sample_weight is not None:
        sampling_weights(empty, config.sample_weight)


def _choose_documents(table: pyarrow.Table, config: SelectConfig) -> pd.DataFrame:
    """Return all documents with their ``source``, and whether they are ``selected``."""
    documents = table.to_pandas()
    passes = documents["error"].isna() & (config.where is None or meets_conditions(table, config.where))
    documents = documents.assign(source=_source_of_each(table, config.by), selected=passes)
    if config.unique:
        documents["selected"] &= is_first_of_its_text(documents)
    if config.top is not None:
        documents["selected"] &= is_in_top(documents, config.rank_by, config.top)
    if config.sample is not None or config.sample_tokens is not None:
        weights = None if config.sample_weight is None else sampling_weights(table, config.sample_weight)
        amount = {"count": config.sample, "tokens": config.sample_tokens}
        documents["selected"] &= is_in_sample(documents, weights, **amount, seed=config.seed)
    if not documents["selected"].any():
        raise ValueError(
            "No document meets the conditions. Relax `where`: the page of the corpus (`page`) shows how many documents"
            " each threshold keeps."
        )
    return documents


def _read_scores(shards: ScoreShards, config: SelectConfig) -> pyarrow.Table:
    """Read the needed columns: all but per-token values if documents are written, or else those that are used."""
    columns = _list_columns(shards)
    if config.output is None or config.output.endswith(".txt"):
        needed = {"key", "file", "row", "error", "tokens", "compared_tokens", *MEANS, config.rank_by, config.by}
        needed |= {TEXT_HASH} if config.unique else set()
        needed |= {FIRST_WORDS} if config.page is not None else set()
        sql = f"{config.where} {config.sample_weight}".lower()  # SQL ignores case
        columns = [name for name in columns if name in needed or name.lower() in sql or name.startswith("ladder_")]
    return shards.table(columns)


def _list_columns(shards: ScoreShards) -> list[str]:
    return [name for name in shards.schema().names if name not in PER_TOKEN]


def _source_of_each(table: pyarrow.Table, by: str) -> pd.Series:
    if by == FOLDER:
        return pc.replace_substring_regex(table["file"], "/?[^/]*$", "").to_pandas().replace("", ".")
    return source_names(table[by])


def means_by_source(documents: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Compute means over the selected documents of each source; NaN if no document has a value."""
    return documents[documents["selected"]].groupby("source", observed=True)[list(columns)].mean()


def report(documents: pd.DataFrame) -> str:
    """Format the tables of `longce select`."""
    # Mean benefits of a longer context over a shorter one.
    ladder = [name for name in documents if is_ladder_mean(name)]
    passing_tokens = documents["tokens"].where(documents["selected"])
    sources = documents.assign(passing_tokens=passing_tokens).groupby("source", observed=True)
    counts = sources[["selected", "tokens", "passing_tokens"]].sum().astype(int)
    counts.insert(0, "documents", sources.size())
    counts = counts.sort_values("selected", ascending=False, kind="stable")
    columns = [*MEANS, *ladder]
    means = means_by_source(documents, columns).reindex(counts.index)
    counts.loc["all"] = counts.sum()
    means.loc["all"] = documents.loc[documents["selected"], columns].mean()
    counts = counts.map("{:,}".format).rename(columns={"selected": "pass", "passing_tokens": "pass"})
    tables = [_format_table(pd.concat([counts, means[list(MEANS)]], axis=1))]
    if ladder:
        pairs = [" > ".join(name.split("_")[1:3]) for name in ladder]
        benefits = means[ladder].set_axis(pairs, axis=1)
        correlations = documents.loc[documents["selected"], ladder].corr()
        tables += [
            "\nMean benefit of a longer context, nats (documents that pass):",
            _format_table(benefits),
            "\nCorrelation of these benefits over documents:",
            _format_table(correlations.set_axis(pairs, axis=0).set_axis(pairs, axis=1), ""),
        ]
    return "\n".join(tables) + "\n"


def _format_table(table: pd.DataFrame, corner: str = "source") -> str:
    """Format a table as text; sources in the middle are left out if there are many."""
    table = table.rename_axis(index=None, columns=corner)
    return table.to_string(na_rep="-", float_format="{:.4g}".format, max_rows=_MAX_ROWS)
