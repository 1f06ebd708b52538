"""Summarize a corpus from a sample of its documents, before a model is loaded."""

import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerFast

from datamodules.corpus.files import CorpusFiles
from datamodules.sources.documents import is_empty
from datamodules.sources.locations import JSON_LINES, PARQUET
from lightning_modules.batch import DocumentRef

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

    def describe(self, *, short_context: int, duration: str) -> str:
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
            "time": duration,
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
    sample = _sample_documents(corpus, language)
    found = [(ref, text) for ref, text in sample if ref.error is None and not is_empty(text)]
    if sample and not found:
        reason = sample[0][0].error or "it is empty"
        remedy = f"Set `data.text_column` to the text; the fields are {[*corpus.fields]}." if corpus.fields else ""
        raise ValueError(f"None of {len(sample)} documents at the start of the files has text: {reason}. {remedy}")
    kinds = {PARQUET: "parquet", **dict.fromkeys(JSON_LINES, "JSON lines")}
    tokens = [_count_tokens(text, tokenizer) for _, text in found]
    limit = max_tokens or max(tokens, default=0)
    lengths = [min(count, limit) for count in tokens if overlong == "cut" or count <= limit]
    documents = sum(part.expected_rows or 1 for part in corpus.parts)
    sizes = [len(text.encode()) for _, text in found]
    languages = Counter(str(ref.columns[language]) for ref, _ in found if ref.columns.get(language))
    return CorpusPreview(
        files=Counter(next((kinds[end] for end in kinds if name.endswith(end)), "text") for name in corpus.names),
        fields=corpus.fields,
        documents=documents,
        size=documents * sum(sizes) / max(len(sample), 1),
        tokens=documents * sum(lengths) / max(len(sample), 1),
        sizes=sizes,
        lengths=lengths,
        overlong=float(np.mean([count > limit for count in tokens] or [False])),
        contents=languages or count_scripts("".join(text[: _CHARACTERS // 16] for _, text in found)),
    )


def _sample_documents(corpus: CorpusFiles, language: str) -> list[tuple[DocumentRef, str]]:
    """Read the first documents of some parts; parts with many documents are likelier, and more of them are read."""
    if not corpus.parts:
        return []
    if language and language not in corpus.columns.others:
        columns = corpus.columns._replace(others=(*corpus.columns.others, language))
        corpus = replace(corpus, columns=columns, column_types={**corpus.column_types, language: pyarrow.string()})
    rows = np.array([part.expected_rows or 1 for part in corpus.parts], dtype=np.float64)
    drawn = np.random.default_rng(0).choice(len(rows), _DOCUMENTS, p=rows / rows.sum())

    def read(index: int, count: int) -> list[tuple[DocumentRef, str]]:
        try:
            return list(islice(corpus.read(corpus.parts[index], lambda _: True), count))
        except (ValueError, OSError):  # a damaged file is reported when all others are done
            return []

    with ThreadPoolExecutor(_READER_THREADS) as pool:
        parts, counts = np.unique(drawn, return_counts=True)
        return [each for own in pool.map(read, parts.tolist(), counts.tolist()) for each in own]


def _count_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> int:
    """Count the tokens of a text; of a long one, estimate them from its beginning."""
    start = text[:_CHARACTERS]
    return round(len(tokenizer.backend_tokenizer.encode(start, add_special_tokens=False).ids) * len(text) / len(start))


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
