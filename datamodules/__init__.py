"""Text to packed rows."""

from datamodules.gov_report import GovReportDataModule
from datamodules.packed_text import PackedTextDataModule
from datamodules.pg19 import PG19DataModule
from datamodules.pile_arxiv import PileArxivDataModule

__all__ = ["GovReportDataModule", "PG19DataModule", "PackedTextDataModule", "PileArxivDataModule"]
