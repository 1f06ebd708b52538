"""Real texts of the studies: reports, books and papers, cut once to one length, so that all models read the same."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.scored_model import ScoredModel

REPORTS = "govreport/govreport_longbench_sample.jsonl"
PAPERS = "pile-arxiv/arxiv_like.jsonl"
BOOKS = "pg19/test"

BOOK_NUMBERS = (860, 2544, 3129, 5396, 5770, 5962)
"""The six smallest numbers of the test split of PG-19."""

PAPER_LINES = (3, 13, 22, 36, 48, 49)
"""One paper or chapter of each source."""

LONG_BOOKS = (2544, 5396, 5962, 10146, 10321)
"""The smallest numbers of the books with 16k tokens and more."""

BOOK_START = 20_000
"""Characters of a book that are left out: title pages and tables of contents."""


class Text(NamedTuple):
    """A document of the studies."""

    name: str
    kind: str  # reports, books or papers
    text: str


def read_texts(data: Path, evaluator: ScoredModel, tokens: int) -> list[Text]:
    """Read 12 reports, 6 books and 6 papers, each cut to its first ``tokens`` tokens of an evaluator.

    Raises:
        OSError: If the folder lacks one of the files.
        ValueError: If a text is shorter.
    """
    papers = _read_lines(data / PAPERS, "text")
    found = [*_reports(data), *_books(data), *(Text(f"paper {line}", "papers", papers[line]) for line in PAPER_LINES)]
    return [each._replace(text=_cut(each, evaluator, tokens)) for each in found]


def read_exam_texts(data: Path, evaluator: ScoredModel, tokens: int) -> list[Text]:
    """Read the first six reports that have ``tokens`` tokens of an evaluator, and six books, cut to them."""
    encode = partial(evaluator.encode, max_tokens=tokens)
    long = (each for each in _reports(data) if encode(each.text, name=each.name)["input_ids"].shape[1] == tokens)
    return [each._replace(text=_cut(each, evaluator, tokens)) for each in [*islice(long, 6), *_books(data)]]


def read_books(data: Path, numbers: Sequence[int], tokenizer: PreTrainedTokenizerFast, tokens: int) -> list[Text]:
    """Read books, each cut to its first ``tokens`` tokens of a tokenizer."""
    found = []
    for number in numbers:
        book = (data / BOOKS / f"{number}.txt").read_text(encoding="utf-8")[BOOK_START:]
        name = f"long book {number}"
        text = encode_document(book, tokenizer, name=name, max_tokens=tokens)["text"][0]
        found.append(Text(name, "books", text))
    return found


def read_validation_books(data: Path, evaluator: ScoredModel, tokens: int) -> list[Text]:
    """Read the six books of the validation split with the smallest numbers, cut like those of `read_texts`."""
    files = sorted((data / "pg19/validation").glob("*.txt"), key=lambda file: int(file.stem))[:6]
    found = [Text(f"book {file.stem}", "books", file.read_text(encoding="utf-8")[BOOK_START:]) for file in files]
    return [each._replace(text=_cut(each, evaluator, tokens)) for each in found]


def _reports(data: Path) -> list[Text]:
    return [Text(f"report {line}", "reports", text) for line, text in enumerate(_read_lines(data / REPORTS, "input"))]


def _books(data: Path) -> list[Text]:
    """Return the books of the test split without their first pages."""
    texts = [(data / BOOKS / f"{number}.txt").read_text(encoding="utf-8") for number in BOOK_NUMBERS]
    return [
        Text(f"book {number}", "books", text[BOOK_START:]) for number, text in zip(BOOK_NUMBERS, texts, strict=True)
    ]


def _cut(text: Text, evaluator: ScoredModel, tokens: int) -> str:
    batch = evaluator.encode(text.text, name=text.name, max_tokens=tokens)
    if (length := batch["input_ids"].shape[1]) < tokens:
        raise ValueError(f"'{text.name}' has only {length:,} of {tokens:,} tokens.")
    return batch["text"][0]


def _read_lines(file: Path, field: str) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)[field] for line in islice(lines, 100)]
