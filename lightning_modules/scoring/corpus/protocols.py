"""Contracts between a corpus and the callbacks that store its scores, which do not import each other."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow

from lightning_modules.scoring.corpus.shards import ExistingScores


class ReadProgress(NamedTuple):
    """Progress of a process in a corpus."""

    documents: int  # number of documents, failed ones included
    complete: bool  # whether it has had all of its documents
    unreadable: list[str]  # files, or parts of them, that could not be read, with the reason


@runtime_checkable
class ScoreSink(Protocol):
    """A callback that writes the scores of documents, and knows those of earlier runs."""

    def existing_scores(self) -> ExistingScores:
        """Return what is scored already, to be left out; called once, in the first process."""


@runtime_checkable
class ScoredCorpus(Protocol):
    """A data module of documents in files."""

    column_types: Mapping[str, pyarrow.DataType]  # of `DocumentRef.columns`
    allowed_failures: float  # share of the documents of a source that may fail

    def source(self, file: str) -> str:
        """Return the source that a file belongs to."""

    def versions(self, files: Iterable[str]) -> dict[str, str]:
        """Return the content identity of files by their names; an error if one has changed during the run."""

    def scoring_settings(self) -> dict[str, Any]:
        """Return all settings that decide which tokens are scored, as plain values."""

    def source_settings(self) -> dict[str, Any]:
        """Return arguments that find the same documents again."""

    def expected(self) -> int | None:
        """Estimate how many documents this process gets; None if that is unknown before the files are read."""

    def read_progress(self) -> ReadProgress:
        """Return the progress of this process."""
