"""Summarize a corpus from a sample of its documents, before a model is loaded."""

import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerFast

from datamodules.corpus.files import CorpusFiles
from datamodules.sources.documents import is_empty
from datamodules.sources.locations import JSON_LINES, PARQUET
from datamodules.sources.records import lines_of, opened
from lightning_modules.batch import DocumentRef
from lightning_modules.models.tokenization.encoding import encode_text

_DOCUMENTS = 64  # of the sample
_CHARACTERS = 1 << 15  # at most, of each that are tokenized; about 2 MB in all
_READER_THREADS = 16
_LANGUAGE_FIELDS = ("language", "lang")
_MAX_FIELDS, _MAX_LANGUAGES = 12, 4  # in the summary


@dataclass(frozen=True)
class CorpusPreview:
    """Estimates of a corpus: the number of documents, their bytes of text, and the tokens to score.

    ``sizes`` (bytes) are those of the sampled documents, and ``lengths`` (tokens) of those among them that are scored.
    A fraction ``overlong`` of the sample is longer than the maximum. ``contents`` counts languages or scripts.
    """

    files: Counter[str]  # by kind
    fields: tuple[str, ...]
    documents: float
    size: float
    tokens: float
    sizes: list[int]
    lengths: list[int]
    overlong: float
    contents: Counter[str]

    def describe(self, *, short_context: int) -> str:
        """Return the summary; documents of at most ``short_context`` tokens have no long context to compare."""
        about = "about " if "JSON lines" in self.files else ""
        smallest, median, largest = (_format_size(size) for size in np.quantile(self.sizes or [0], (0, 0.5, 1)))
        short = np.mean([length <= short_context for length in self.lengths] or [False])
        contents = self.contents.most_common(_MAX_LANGUAGES)
        lines = {
            "files": ", ".join(f"{count:,} {kind}" for kind, count in self.files.items()),
            "fields": ", ".join([*self.fields[:_MAX_FIELDS], *(["..."] if len(self.fields) > _MAX_FIELDS else [])]),
            "documents": f"{about}{self.documents:,.0f} with about {_format_size(self.size)} of text; smallest"
            f" {smallest}, median {median}, largest {largest}",
            "content": ", ".join(f"{name} {count / self.contents.total():.0%}" for name, count in contents),
            "tokens": f"about {self.tokens:,.0f} to score; {self.overlong:.0%} of the documents are longer than"
            f" `max_tokens`, {short:.0%} are too short to compare (at most {short_context:,} tokens)",
        }
        table = "\n".join(f"  {name:<10} {value}" for name, value in lines.items() if value)
        return f"Corpus, estimated from {len(self.sizes)} documents at the start of its files and row groups:\n{table}"


def preview_corpus(
    corpus: CorpusFiles,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_tokens: int | None = None,
    overlong: Literal["cut", "skip"] = "cut",
) -> CorpusPreview:
    """Read and tokenize about `_DOCUMENTS` documents from parts drawn by their numbers of documents.

    Raises:
        ValueError: If there are sampled documents, but none has text.
    """
    language = next((name for name in _LANGUAGE_FIELDS if name in corpus.fields), "")
    sample, documents, fraction = _sample_documents(corpus, language)
    found = [(ref, text) for ref, text in sample if ref.error is None and not is_empty(text)]
    if sample and not found:
        reason = sample[0][0].error or "it is empty"
        remedy = f"Set `data.text_column` to the text; the fields are {[*corpus.fields]}." if corpus.fields else ""
        raise ValueError(f"None of {len(sample)} documents at the start of the files has text: {reason}. {remedy}")
    tokens = [_count_tokens(text, tokenizer) for _, text in found]
    limit = max_tokens or max(tokens, default=0)
    lengths = [min(count, limit) for count in tokens if overlong == "cut" or count <= limit]
    sizes = [len(text.encode()) for _, text in found]
    languages = Counter(str(ref.columns[language]) for ref, _ in found if ref.columns.get(language))
    return CorpusPreview(
        files=Counter(map(_file_kind, corpus.names)),
        fields=corpus.fields,
        documents=documents,
        size=sum(sizes) / fraction,
        tokens=documents * sum(lengths) / max(len(sample), 1),
        sizes=sizes,
        lengths=lengths,
        overlong=float(np.mean([count > limit for count in tokens] or [False])),
        contents=languages or count_scripts("".join(text[: _CHARACTERS // 16] for _, text in found)),
    )


def _file_kind(name: str) -> str:
    return "parquet" if name.endswith(PARQUET) else "JSON lines" if name.endswith(JSON_LINES) else "text"


def _sample_documents(corpus: CorpusFiles, language: str) -> tuple[list[tuple[DocumentRef, str]], float, float]:
    """Read the first documents of some parts; return them, the number of all, and the fraction of the bytes read.

    Parts with many documents are likelier, and more of them are read.
    """
    if not corpus.parts:
        return [], 0, 1
    if language and language not in corpus.columns.others:
        columns = corpus.columns._replace(others=(*corpus.columns.others, language))
        corpus = replace(corpus, columns=columns, column_types={**corpus.column_types, language: pyarrow.string()})
    rows = np.array([part.expected_rows or 1 for part in corpus.parts], dtype=np.float64)
    drawn = np.random.default_rng(0).choice(len(rows), _DOCUMENTS, p=rows / rows.sum())

    def read(index: int, count: int) -> tuple[list[tuple[DocumentRef, str]], float]:
        part = corpus.parts[index]
        with suppress(ValueError, OSError):  # a damaged file is reported when all others are done
            documents = list(islice(corpus.read(part, lambda _: True), count))
            if part.rows is not None:
                return documents, part.rows
            with opened(corpus.files[part.file]) as stream:
                lines = (line for line in lines_of(stream) if not line.isspace())
                sizes = [len(line) for line in islice(lines, count)]
            return documents, part.size / float(np.mean(sizes or [part.size]))
        return [], rows[index]

    with ThreadPoolExecutor(_READER_THREADS) as pool:
        sampled, counts = np.unique(drawn, return_counts=True)
        found = list(pool.map(read, sampled.tolist(), counts.tolist()))
    # The parts that were not drawn are corrected like those that were.
    correction = sum(documents for _, documents in found) / rows[sampled].sum()
    sizes = [corpus.parts[index].size for index in sampled]
    read_bytes = sum(size * len(own) / documents for size, (own, documents) in zip(sizes, found, strict=True))
    fraction = read_bytes / sum(part.size for part in corpus.parts) or 1
    return [each for own, _ in found for each in own], float(rows.sum() * correction), fraction


def _count_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> int:
    """Count the tokens of a text; of a long one, estimate them from its beginning; 0 if the tokenizer fails on it."""
    start = text[:_CHARACTERS]
    with suppress(ValueError):  # recorded when it is scored
        return round(len(encode_text(start, tokenizer).ids) * len(text) / len(start))
    return 0


def count_scripts(text: str) -> Counter[str]:
    """Count the letters of each script, which is the first word of a letter's name in Unicode.

    Example:
        >>> count_scripts("Abc, где 7")
        Counter({'Latin': 3, 'Cyrillic': 3})
    """
    scripts: Counter[str] = Counter()
    for letter, count in Counter(filter(str.isalpha, text)).items():
        name = unicodedata.name(letter, "unknown").split()[0].split("-")[0]
        scripts[name if name == "CJK" else name.capitalize()] += count
    return scripts


def _format_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
