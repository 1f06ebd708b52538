"""Summarize a corpus from a sample of its documents, before a model is loaded."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerFast

from datamodules.corpus.files import CorpusFiles, field_names, is_text
from datamodules.sources.documents import is_empty
from datamodules.sources.locations import JSON_LINES, PARQUET, File
from datamodules.sources.records import lines_of, opened

_DOCUMENTS = 64  # of the sample
_CHARACTERS = 1 << 15  # at most, of each that are tokenized; about 2 MB in all
_READER_THREADS = 16
_LANGUAGE_FIELDS = ("language", "lang")
_MAX_FIELDS, _MAX_LANGUAGES = 12, 4  # in the summary


class _Sampled(NamedTuple):
    """A document of the sample; ``stored`` is the mean size of the sampled documents of its part, in bytes."""

    text: str
    error: str | None
    language: str | None
    stored: float
    part: int


@dataclass(frozen=True)
class CorpusPreview:
    """Estimates of a corpus: the number of documents, their bytes of text, and the tokens to score.

    ``sizes`` (bytes) and ``lengths`` (tokens, at most the maximum of a document) are those of the sampled documents, of
    which a fraction ``cut`` is longer than the maximum. ``contents`` counts their languages or scripts.
    """

    files: dict[str, int]  # by kind
    fields: list[str]
    documents: float
    size: float
    tokens: float
    sizes: list[int]
    lengths: list[int]
    cut: float
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
            "documents": f"{about}{self.documents:,.0f} with {_format_size(self.size)} of text; smallest {smallest},"
            f" median {median}, largest {largest}",
            "content": ", ".join(f"{name} {count / self.contents.total():.0%}" for name, count in contents),
            "tokens": f"about {self.tokens:,.0f}; {self.cut:.0%} of the documents are cut at `max_tokens`, {short:.0%}"
            f" are too short to compare (at most {short_context:,} tokens)",
            "time": duration,
        }
        table = "\n".join(f"  {name:<10} {value}" for name, value in lines.items() if value)
        return f"Corpus, estimated from {len(self.sizes)} documents at the start of its files and row groups:\n{table}"


def preview_corpus(
    corpus: CorpusFiles, tokenizer: PreTrainedTokenizerFast, *, max_tokens: int | None = None
) -> CorpusPreview:
    """Read and tokenize about `_DOCUMENTS` documents from parts drawn by their numbers of documents.

    Raises:
        ValueError: If there are sampled documents, but none has text.
    """
    files = {"parquet": PARQUET, "JSON lines": JSON_LINES}
    kinds = {kind: [file for file in corpus.files if file.name.endswith(ending)] for kind, ending in files.items()}
    kinds["text"] = [file for file in corpus.files if is_text(file.name)]
    fields = sorted({field for own in kinds.values() for file in own[:1] for field in field_names(file)})
    sample = _sample_documents(corpus, next((name for name in _LANGUAGE_FIELDS if name in fields), None))
    found = [each for each in sample if each.error is None and not is_empty(each.text)]
    if sample and not found:
        remedy = f"Set `data.text_column` to the text; the fields are {fields}." if fields else "Use other files."
        reason = sample[0].error or "it is empty"
        raise ValueError(f"None of {len(sample)} documents at the start of the files has text: {reason}. {remedy}")
    tokens = [_count_tokens(each.text, tokenizer) for each in found]
    lengths = [min(count, max_tokens or count) for count in tokens]
    stored, size = sum(each.stored for each in sample) or 1, sum(part.size for part in corpus.parts)
    sizes = [len(each.text.encode()) for each in found]
    languages = Counter(each.language for each in found if each.language)
    return CorpusPreview(
        files={kind: len(own) for kind, own in kinds.items() if own},
        fields=fields,
        documents=(documents := _count_documents(corpus, sample)),
        size=size * sum(sizes) / stored,
        tokens=documents * sum(lengths) / max(len(sample), 1),
        sizes=sizes,
        lengths=lengths,
        cut=float(np.mean([count > length for count, length in zip(tokens, lengths, strict=True)] or [False])),
        contents=languages or count_scripts("".join(each.text[: _CHARACTERS // 16] for each in found)),
    )


def _sample_documents(corpus: CorpusFiles, language: str | None) -> list[_Sampled]:
    """Read the first documents of some parts; parts with many documents are likelier, and more of them are read."""
    if not corpus.parts:
        return []
    rows = np.array([part.expected_rows or 1 for part in corpus.parts], dtype=np.float64)
    drawn = np.random.default_rng(0).choice(len(rows), _DOCUMENTS, p=rows / rows.sum())
    if language is not None and language not in corpus.columns.others:
        columns = corpus.columns._replace(others=(*corpus.columns.others, language))
        corpus = replace(corpus, columns=columns, column_types={**corpus.column_types, language: pyarrow.string()})

    def read(index: int, count: int) -> list[_Sampled]:
        part = corpus.parts[index]
        stored = part.size / (part.expected_rows or 1)
        try:
            documents = list(islice(corpus.read(part, lambda _: True), count))
            if part.rows is None:
                stored = float(np.mean(_line_sizes(corpus.files[part.file], count) or [1]))
        except (ValueError, OSError):  # a damaged file is reported when all others are done
            return []
        return [_Sampled(text, ref.error, ref.columns.get(language or ""), stored, index) for ref, text in documents]

    with ThreadPoolExecutor(_READER_THREADS) as pool:
        parts, counts = np.unique(drawn, return_counts=True)
        return [each for own in pool.map(read, parts.tolist(), counts.tolist()) for each in own]


def _count_documents(corpus: CorpusFiles, sample: Sequence[_Sampled]) -> float:
    """Count the documents of the parts that record their number, and estimate those of the others by their bytes."""
    known = sum(part.rows or 0 for part in corpus.parts)
    means = {each.part: each.stored for each in sample if corpus.parts[each.part].rows is None}
    size = sum(part.size for part in corpus.parts if part.rows is None)
    if not means:
        return known + sum(part.expected_rows or 1 for part in corpus.parts if part.rows is None)
    sampled = sum(corpus.parts[index].size for index in means)
    return known + size / sampled * sum(corpus.parts[index].size / mean for index, mean in means.items())


def _line_sizes(file: File, count: int) -> list[int]:
    """Return the bytes of the first lines of a file that are not blank."""
    with opened(file) as stream:
        return [len(line) for line in islice((line for line in lines_of(stream) if not line.isspace()), count)]


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
    letters = Counter(letter for letter in text if letter.isalpha())
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        name = unicodedata.name(letter, "unknown").split()[0].split("-")[0]
        scripts[name if name == "CJK" else name.capitalize()] += count
    return scripts


def _format_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
