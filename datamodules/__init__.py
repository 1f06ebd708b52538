"""Data modules that turn text into packed sequences."""

from typing import TYPE_CHECKING, Any

from datamodules.corpora import GovReportDataModule, PG19DataModule, PileArxivDataModule
from datamodules.mixture import MixtureDataModule
from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.sequences import collate_examples
from datamodules.recall import RecallDataModule
from datamodules.text import StreamingTextDataModule, TextDataModule

if TYPE_CHECKING:
    from datamodules.corpus.module import DocumentCorpus

__all__ = [
    "DocumentCorpus",
    "GovReportDataModule",
    "MixtureDataModule",
    "PG19DataModule",
    "PackedTextDataModule",
    "PileArxivDataModule",
    "RecallDataModule",
    "StreamingTextDataModule",
    "TextDataModule",
    "collate_examples",
]


def __getattr__(name: str) -> Any:
    if name == "DocumentCorpus":  # needs the extra `corpora`
        from datamodules.corpus.module import DocumentCorpus

        return DocumentCorpus
    raise AttributeError(f"module 'datamodules' has no attribute {name!r}")
