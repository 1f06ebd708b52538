"""Make documents that depend on their far past: in a synthetic language, without data, or of real text."""

from datamodules.recall.corpus import RecallCorpus
from datamodules.recall.documents import RecallRecord, recall_documents, recall_questions, recall_records
from datamodules.recall.haystack import HaystackCorpus, HaystackDataModule, HaystackSource
from datamodules.recall.language import (
    ABOUT,
    FIELDS,
    GENRES,
    GET,
    SET,
    field_values,
    genre_words,
    recall_tokenizer,
)
from datamodules.recall.module import RecallDataModule, RecallSource
from datamodules.recall.task import RecallTask

__all__ = [
    "ABOUT",
    "FIELDS",
    "GENRES",
    "GET",
    "SET",
    "HaystackCorpus",
    "HaystackDataModule",
    "HaystackSource",
    "RecallCorpus",
    "RecallDataModule",
    "RecallRecord",
    "RecallSource",
    "RecallTask",
    "field_values",
    "genre_words",
    "recall_documents",
    "recall_questions",
    "recall_records",
    "recall_tokenizer",
]
