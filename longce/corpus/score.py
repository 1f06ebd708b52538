"""Score the documents of a corpus into parquet files, and resume."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
import torch
from tqdm import tqdm

from datamodules.sources.corpus import CorpusColumns, CorpusFiles, find_corpus, is_text
from datamodules.sources.locations import fixed_folder, is_url
from lightning_modules.models.loading.identity import check_same_model, describe_model, model_identity
from lightning_modules.scoring.corpus.counts import count_documents, report_failures
from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards
from lightning_modules.scoring.corpus.table import find_reserved_names
from lightning_modules.scoring.long_context_scorer import LongContextScorer
from lightning_modules.scoring.score import find_device
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.files import remove_unfinished
from lightning_modules.utilities.identity import combined_hash
from lightning_modules.utilities.locks import RunLock
from lightning_modules.utilities.progress import progress_bar
from longce.corpus.config import COLUMN_OPTIONS, CorpusConfig
from longce.corpus.reading import Document, count_missing, pools, read_ahead, read_missing
from longce.corpus.writing import Writer, file_states, find_scored, signals_stop

_NAMED_FILES = 3  # at most, in a message
_COUNTED = pyarrow.schema(
    {
        **dict.fromkeys(("file", "error"), pyarrow.string()),
        **dict.fromkeys(("row", "tokens", "compared_tokens", "key_tokens"), pyarrow.int64()),
    }
)

_log = logging.getLogger(__name__)


def score_corpus(files: Sequence[str], config: CorpusConfig) -> str:
    """Score the documents of a shard, or of all shards on a cluster; return a line with their counts.

    For arguments and errors see `score_shard`.
    """
    if config.engine == "ray":
        from longce.corpus.on_ray import score_on_ray

        counts = score_on_ray(files, config)
    else:
        counts = score_shard(files, config)
    return (
        f"{counts['documents']:,} documents with {counts['tokens']:,} tokens in {config.shard_folder}:"
        f" {counts['failed']:,} failed and {counts['left_out']:,} left out (column `error`),"
        f" {counts['too_short']:,} too short to have a short context."
    )


def score_shard(files: Sequence[str], config: CorpusConfig) -> dict[str, int]:
    """Score the documents of a shard that have no scores yet, and return the counts of all.

    A document is a row of a ``.parquet`` file, a line of a ``.jsonl`` or ``.json`` file, or a ``.txt`` file (text and
    JSON also as ``.gz`` and ``.zst``); file and row number identify it. Its scores are a row of a ``part-*.parquet``
    file, which is written atomically. One that fails is a row with the reason in ``error``, and counts as done.

    Args:
        files: Files, folders (searched recursively) and patterns, local or as fsspec URLs. Results name a file by its
            path relative to the folder or pattern.
        config: All other settings.

    Raises:
        ValueError: If the files, the settings and the existing scores do not match, or a file changes or cannot be
            read to its end; finished scores are kept.
        IncompleteError: If more documents failed than are allowed.
    """
    # 1. Find the documents, and those that have scores.
    columns = CorpusColumns(config.text_column, config.key_column, tuple(config.columns), config.token_column)
    clash = find_reserved_names(config.columns)
    if clash:
        raise ValueError(f"`columns` has {clash}, which are names of other columns: rename them in the corpus.")
    _check_place(files, config.output)
    shards = _open_folder(config)
    scorer = _make_scorer(config)
    corpus = find_corpus(files, columns, check=config.allowed_failures < 1)
    states = file_states(corpus)
    identity = model_identity(scorer.loading)
    settings = _describe_settings(scorer, corpus, config, identity)
    with _only_writer(shards), signals_stop():
        done = find_scored(shards, settings, corpus, states)
        shards.remove_success()
        # 2. Score the others. A thread reads and tokenizes the next documents meanwhile.
        source = {"files": [*files], **{name: getattr(config, name) for name in COLUMN_OPTIONS}}
        writer = Writer(shards, {"settings": settings, "source": source}, corpus, states, config)
        shares = corpus.shares(*config.shard_numbers)
        unreadable: list[str] = []
        encode = scorer.encode if config.token_column is None else scorer.encode_tokens
        documents = read_missing(corpus, shares, done, encode, unreadable)
        with progress_bar("Scoring", unit=" documents", total=count_missing(shares, done), scaled=False) as bar:
            try:
                for pool in read_ahead(pools(documents, config.batch_tokens, config.shard_rows)):
                    for batch in _batches(pool, scorer):
                        refs, encoded = zip(*batch, strict=True)
                        if any(document.batch is not None for document in encoded):
                            _load(scorer, identity)
                        scores = scorer.score_encoded(encoded)
                        tokens = sum(document.tokens for document in encoded)
                        writer.add(refs, scores, tokens)
                        _show_rate(bar, writer)
                _verify(scorer, writer)
            finally:  # even if it is stopped, so that no scores are lost
                writer.write()
        # 3. Count all documents of the shard, those of earlier runs included.
        return _finish(shards, settings, unreadable, config)


def _batches(pool: Sequence[Document], scorer: LongContextScorer) -> Iterator[Sequence[Document]]:
    """Yield the documents that cannot be scored, and those of each batch: they are kept as soon as they have scores."""
    unscored = [document for document in pool if document[1].batch is None]
    if unscored:
        yield unscored
    for places in scorer.group_by_length([document for _, document in pool]):
        yield [pool[place] for place in places]


def _check_place(files: Sequence[str], output: str) -> None:
    """Refuse an output that a later command would read as a part of the corpus."""
    folder = Path(output).expanduser().resolve()
    for path in files:
        place = Path(fixed_folder(path)).expanduser()
        if is_url(path) or is_url(output) or not place.is_dir() or ("*" in path and "**" not in path):
            continue
        if folder.is_relative_to(place.resolve()):
            raise ValueError(f"`output` = '{output}' is in '{path}', whose files are scored: use a folder elsewhere.")


def _open_folder(config: CorpusConfig) -> ScoreShards:
    """Return the folder of the shard; refuse a folder that has scores of another number of shards."""
    _, shards = config.shard_numbers
    whole = ScoreShards(config.output)
    own = whole if shards == 1 else ScoreShards(config.shard_folder)
    whole.check_writable()
    for name in whole.entries():
        found = _find_shards(name)
        if found not in (None, shards):
            raise ValueError(
                f"'{config.output}' has scores in {found} shard(s), and `shard` is {config.shard}: documents would be"
                " scored twice. Use the same number of shards, or another folder."
            )
    own.check_writable()
    return own


def _find_shards(name: str) -> int | None:
    """Return in how many shards the scores are that an entry of a folder belongs to; None for another entry."""
    shard = re.fullmatch(r"shard-\d+-of-(\d+)", name)
    if shard:
        return int(shard[1])
    if name.endswith(".parquet"):
        return 1
    return None


def _make_scorer(config: CorpusConfig) -> LongContextScorer:
    device = config.device
    local_rank = os.environ.get("LOCAL_RANK")
    if device == "auto" and local_rank is not None and torch.cuda.is_available():
        device = f"cuda:{local_rank}"
    not_its_own = {"output", "columns", "key_column", "shard", "allowed_failures", "shard_rows", "shard_minutes"}
    not_its_own |= {"engine", "num_shards"}
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in not_its_own}
    return LongContextScorer(**{**options, "device": device})


def _describe_settings(
    scorer: LongContextScorer, corpus: CorpusFiles, config: CorpusConfig, identity: str
) -> dict[str, Any]:
    """Return all settings that the scores of a shard depend on, without loading the model with this identity."""
    model = describe_model(scorer.loading, scorer.tokenizer, device=find_device(scorer.device), identity=identity)
    names = ["context_length", "stride", "alpha", "beta", "gamma", "contexts", "per_token", "quantization"]
    names += ["max_tokens", "add_special_tokens", *COLUMN_OPTIONS]
    index, shards = config.shard_numbers
    # A shard's choice of documents depends on all parts.
    parts = combined_hash([[part.file, part.row_group, part.rows] for part in corpus.parts])
    shard = "0/1"
    if shards > 1:
        shard = f"{index}/{shards} of the files and row groups {parts[:16]}"
    return {
        "model": model.identity,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype,
        "attention": model.attention,
        **{name: getattr(config, name) for name in names},
        "overlong": None if config.max_tokens is None else config.overlong,
        "columns": {name: str(kind) for name, kind in corpus.column_types.items()},
        "shard": shard,
    }


def _load(scorer: LongContextScorer, identity: str) -> None:
    """Load the model unless it is loaded; raise a ``ValueError`` if its identity has changed."""
    if "document_scorer" not in vars(scorer):
        _ = scorer.document_scorer
        check_same_model(identity, scorer.loading)


def _verify(scorer: LongContextScorer, writer: Writer) -> None:
    """Raise a ``ValueError`` if the model of a server has changed; log the work of the servers."""
    if "document_scorer" not in vars(scorer):
        return
    backbone = scorer.document_scorer.backbone
    try:
        backbone.verify()
    except ValueError:
        writer.discard()  # the other model may have scored them
        raise
    report = backbone.report()
    if report:
        _log.info("%s", report)


def _show_rate(bar: tqdm, writer: Writer) -> None:
    seconds = max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(f"{tqdm.format_sizeof(writer.tokens / seconds)} tokens/s", refresh=False)
    bar.update(writer.documents - bar.n)


def _finish(
    shards: ScoreShards, settings: Mapping[str, Any], unreadable: Sequence[str], config: CorpusConfig
) -> dict[str, int]:
    """Write ``_SUCCESS.json`` with the counts of all documents, if all are done and few failed; return the counts."""
    # 1. Every file must have been read to its end.
    if unreadable:
        raise ValueError(
            f"{len(unreadable)} file(s) or parts of files could not be read to the end; all other documents are done:"
            f" {'; '.join(unreadable[:_NAMED_FILES])} -- Replace these files, delete the files in '{shards}' that have"
            " them in the column `file`, and run the same command again."
        )
    # 2. No source may have too many failed documents.
    tables = [table for _, _, table in shards.read(_COUNTED.names)]
    scores = pyarrow.concat_tables([_COUNTED.empty_table(), *tables])  # a shard may have no document
    report = report_failures(scores, _source, allowed=config.allowed_failures)
    if report:
        raise IncompleteError(
            f"More documents failed than `allowed_failures` = {config.allowed_failures:g} allows:\n{report}\nAll"
            f" scores are kept in {shards}, without {SUCCESS}. Correct these documents and score them into another"
            " folder, or accept the failures: run the same command with a larger `--allowed_failures`, which scores"
            " nothing again."
        )
    # 3. Count.
    counts = count_documents(scores)
    shards.write_success({**counts, "shards": len(tables), "settings": settings})
    return counts


def _source(file: str) -> str:
    """Return the source of a file: the file itself, or the folder of a text file, which is only one document."""
    return PurePosixPath(file).parent.as_posix() if is_text(file) else file


@contextmanager
def _only_writer(shards: ScoreShards) -> Iterator[None]:
    """Lock a local folder against other commands, and remove what killed ones left."""
    if shards.local is None:
        yield
        return
    lock = RunLock(shards.local)
    lock.begin()
    try:
        remove_unfinished(shards.local)
        yield
    finally:
        lock.leave()
