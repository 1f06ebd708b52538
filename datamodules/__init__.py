"""Data modules that turn text into packed rows."""

from datamodules.corpus.module import DocumentCorpus
from datamodules.gov_report import GovReportDataModule
from datamodules.mixture import MixtureDataModule
from datamodules.packed_text import PackedTextDataModule
from datamodules.pg19 import PG19DataModule
from datamodules.pile_arxiv import PileArxivDataModule
from datamodules.recall import RecallDataModule
from datamodules.text import StreamingTextDataModule, TextDataModule

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
]
