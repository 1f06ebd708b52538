"""Data modules that turn text into packed sequences."""

from datamodules.corpora import GovReportDataModule, PG19DataModule, PileArxivDataModule
from datamodules.mixture import MixtureDataModule
from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.sequences import collate_examples
from datamodules.recall import RecallDataModule
from datamodules.text import StreamingTextDataModule, TextDataModule

__all__ = [
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
