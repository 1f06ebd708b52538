"""What a corpus and those who keep its scores ask of each other; they meet in a trainer, and import neither."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow

from lightning_modules.scoring.score_shards import Written


class Delivered(NamedTuple):
    """What a process has had of a corpus.

    Attributes:
        documents: How many, failed ones included.
        complete: Whether there are no more for it.
        unreadable: Files, or parts of them, that could not be read, with the reason.
    """

    documents: int
    complete: bool
    unreadable: list[str]


@runtime_checkable
class KeepsScores(Protocol):
    """A callback that writes what becomes of the documents of a corpus, and knows those of earlier runs."""

    def written(self) -> Written:
        """What was scored before, and is left out now; asked once, of the first process alone."""
        ...


@runtime_checkable
class ScoredCorpus(Protocol):
    """A data module of documents in files.

    Attributes:
        column_types: What `Origin.columns` holds.
        allowed_failures: Share of the documents of a source that may fail.
    """

    column_types: Mapping[str, pyarrow.DataType]
    allowed_failures: float

    def source(self, file: str) -> str:
        """Return the source that a file belongs to."""
        ...

    def versions(self, files: Iterable[str]) -> dict[str, str]:
        """Identity of the content of some files by their names; an error if one has changed during the run."""
        ...

    def scoring_settings(self) -> dict[str, Any]:
        """All that decides which tokens are scored, in plain values."""
        ...

    def source_settings(self) -> dict[str, Any]:
        """Arguments by which the same documents are found again."""
        ...

    def expected(self) -> int | None:
        """About how many documents this process gets; None if nobody knows without reading the files."""
        ...

    def delivered(self) -> Delivered:
        """What this process has had so far."""
        ...
