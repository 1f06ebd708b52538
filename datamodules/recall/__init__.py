"""Synthetic language whose documents depend on their far context; needs no data."""

from datamodules.recall.documents import recall_documents
from datamodules.recall.language import ABOUT, GET, SET, recall_tokenizer
from datamodules.recall.module import RecallDataModule
from datamodules.recall.task import RecallTask

__all__ = ["ABOUT", "GET", "SET", "RecallDataModule", "RecallTask", "recall_documents", "recall_tokenizer"]
