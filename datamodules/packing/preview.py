"""Show training sequences as text, with the boundaries and cuts of their documents."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
from transformers import PreTrainedTokenizerFast

from datamodules.packing.packing import document_of
from datamodules.packing.sequences import PackedRowDataset
from datamodules.sources.content import Document
from datamodules.sources.documents import with_text


def preview(
    rows: PackedRowDataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    packing: str,
    numbers: Sequence[int],
    width: int,
    documents: Iterable[Document] | None = None,
) -> str:
    """Summarize the training sequences, and show those with the given indices.

    The middle of texts with more than `width` characters is left out. Names are shown if `documents`, the training
    documents, are given, which are then read up to the last one shown.
    """
    if any(not 0 <= number < len(rows) for number in numbers):
        raise ValueError(f"`rows` must be indices of sequences from 0 to {len(rows) - 1:,}, got {list(numbers)}.")
    shown: set[int] = set()
    for number in numbers:
        shown.update(_documents_in_row(rows, number))
    titles = {}
    if documents is not None:
        titles = _read_names(documents, shown)
    lines = list(_describe_packing(rows, packing))
    for number in numbers:
        lines += ["", *_describe_row(rows, number, titles, tokenizer, width)]
    return "\n".join(lines) + "\n"


def _describe_packing(rows: PackedRowDataset, packing: str) -> Iterator[str]:
    packed = rows.rows
    lengths = np.diff(rows.store.document_boundaries)
    isolated = "documents isolated" if rows.isolate_documents else "contexts cross document boundaries"
    yield f"packing      {packing}, {isolated}"
    yield (
        f"documents    {len(lengths):,} of {lengths.sum():,} tokens: median {np.median(lengths):,.0f},"
        f" longest {lengths.max():,}, {np.count_nonzero(lengths == 0):,} empty"
    )
    yield f"packed into  {packed}"
    if rows.pose is not None:
        yield f"positions    in {rows.pose.chunks} chunks of each document, up to {rows.pose.target_length:,}"
    scored = _count_scored_tokens(rows)
    places = len(packed) * packed.sequence_length
    prompts = "" if rows.store.prompt_spans is None or rows.loss_on_prompt else ", not counting prompts"
    yield f"scored       {scored:,} tokens ({scored / places:.2%} of all positions){prompts}"


def _count_scored_tokens(rows: PackedRowDataset) -> int:
    """Count the labels that are not ignored in all sequences, without building the sequences."""
    segments = rows.rows.segments
    first = np.full(len(segments), int(rows.isolate_documents))  # the first token of a document has no context
    first[rows.rows.row_boundaries[:-1]] = 1
    unscored = int(first.sum())
    if not rows.loss_on_prompt:
        unscored += int(rows.count_prompt_tokens(segments + np.stack([first, np.zeros_like(first)], axis=1)).sum())
    return rows.rows.tokens - unscored


def _describe_row(
    rows: PackedRowDataset, number: int, names: dict[int, str], tokenizer: PreTrainedTokenizerFast, width: int
) -> Iterator[str]:
    segments = rows.rows.row(number)
    lengths = segments[:, 1] - segments[:, 0]
    padded = rows.rows.sequence_length - int(lengths.sum())
    yield f"sequence {number:,}   tokens {lengths.sum():,}, documents {len(segments):,}, padding {padded:,}"
    place = 0
    for (start, stop), document in zip(segments.tolist(), _documents_in_row(rows, number), strict=True):
        name = f" ({visible(names[document])})" if document in names else ""
        part = _describe_segment(rows, document, start, stop)
        end = place + stop - start
        yield f"  {place:,} to {end:,}: document {document:,}{name}, {part}"
        place = end
        is_prompt = rows.prompt_mask(start, stop)
        edges = [0, *(np.flatnonzero(np.diff(is_prompt)) + 1).tolist(), stop - start]
        for begin, finish in pairwise(edges):  # turns of prompts and responses
            title = ""
            if is_prompt[begin]:
                title = "prompt   "
            elif is_prompt.any():
                title = "response "
            ids = rows.store.tokens[start + begin : start + finish].tolist()
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            yield f"    {title}| {shortened(text, width)}"


def _describe_segment(rows: PackedRowDataset, document: int, start: int, stop: int) -> str:
    """Describe which tokens of a document a segment contains, and where it was cut."""
    begin, end = rows.store.document_boundaries[document : document + 2].tolist()
    if (start, stop) == (begin, end):
        return "whole"
    cuts = []
    if start > begin:
        cuts.append("start")
    if stop < end:
        cuts.append("end")
    return f"tokens {start - begin:,} to {stop - begin:,} of {end - begin:,}, cut at the {' and '.join(cuts)}"


def _documents_in_row(rows: PackedRowDataset, number: int) -> list[int]:
    """Return the document index of each segment of a sequence."""
    return document_of(rows.rows.row(number)[:, 0], rows.store.document_boundaries).tolist()


def _read_names(documents: Iterable[Document], wanted: set[int]) -> dict[int, str]:
    first = islice(with_text(documents), max(wanted, default=-1) + 1)
    return {index: document.name for index, document in enumerate(first) if index in wanted}


def shortened(text: str, width: int) -> str:
    """Shorten a text to one line; the middle is left out if it has more than `width` characters."""
    if len(text) <= width:
        return visible(text)
    head = text[: (width + 1) // 2]
    tail = text[len(text) - width // 2 :]
    return f"{visible(head)} [{len(text) - width:,} characters] {visible(tail)}"


def visible(text: str) -> str:
    r"""Escape every character that is not printable or moves the cursor.

    Example:
        >>> visible("a\tb\x1b[2J 日本 🙂")
        'a\\tb\\x1b[2J 日本 🙂'
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
