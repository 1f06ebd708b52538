"""Protocols between a corpus and the callbacks that store its scores, which do not import each other."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow


class ReadProgress(NamedTuple):
    """Progress of a process in a corpus."""

    documents: int  # number of documents so far, including failed ones
    complete: bool  # whether these are all of its documents
    unreadable: list[str]  # files, or parts of files, that could not be read, with the reason


@runtime_checkable
class ScoredCorpus(Protocol):
    """A data module of documents in files."""

    column_types: Mapping[str, pyarrow.DataType]  # of `DocumentRef.columns`
    allowed_failures: float  # fraction of a source's documents that may fail

    def source(self, file: str) -> str:
        """Return the source that a file belongs to."""

    def versions(self, files: Iterable[str]) -> dict[str, str]:
        """Return the content hashes of files by name; raise an error if one has changed during the run."""

    def scoring_settings(self) -> dict[str, Any]:
        """Return all settings that determine which tokens are scored, as plain values."""

    def source_settings(self) -> dict[str, Any]:
        """Return the settings with which the same documents can be read again."""

    def expected(self) -> int | None:
        """Estimate how many documents this process gets, or return None if it is unknown before reading the files."""

    def read_progress(self) -> ReadProgress:
        """Return the progress of this process."""
