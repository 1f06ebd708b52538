"""Tokenise a corpus once, into a folder that is either whole or not there."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from datamodules.sources import Source
from lightning_modules.files import atomic_folder, writable_folder
from lightning_modules.tokenization import tokenizer_hash, vocabulary_size

FORMAT = 1
"""Part of every store's address: raise it with any change to what the code below writes."""

MANIFEST, TOKENS, DOCUMENT_BORDERS = "manifest.json", "tokens.bin", "document_borders.npy"

# A batch is bounded both ways: a token costs about 260 bytes between the tokenizer and the file, a character about 65.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1_000_000 * min(max(os.cpu_count() or 1, 4), 32)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """A tokenised corpus on disk, memory-mapped: a flat stream of tokens and where each document ends in it.

    It pickles as its path, so loader workers may be forked or spawned.

    Args:
        folder: A folder written by :func:`build_token_store`.

    Raises:
        ValueError: If the folder is not a whole store.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            bytes_found, bytes_expected = (self.folder / TOKENS).stat().st_size, self.manifest["bytes"]
            whole = bytes_found == bytes_expected and len(self.document_borders) == self.manifest["documents"] + 1
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.folder} is no token store ({error}). Delete it; it is built again.") from error
        if not whole:
            raise ValueError(
                f"The token store {self.folder} is damaged: {TOKENS} has {bytes_found:,} of {bytes_expected:,} bytes,"
                f" {DOCUMENT_BORDERS} {len(self.document_borders):,} entries for {self.manifest['documents']:,}"
                " documents. Delete the folder; it is built again."
            )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What the store was made from, and its size."""
        return json.loads((self.folder / MANIFEST).read_text())

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """Token ids of all documents one after the other."""
        return np.memmap(self.folder / TOKENS, dtype=self.manifest["dtype"], mode="r")

    @cached_property
    def document_borders(self) -> NDArray[np.int64]:
        """``[documents + 1]`` ascending indices ``[0, end of document 1, ..]`` into ``tokens``."""
        return np.load(self.folder / DOCUMENT_BORDERS, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        return type(self), (self.folder,)


def build_token_store(
    source: Source, tokenizer: PreTrainedTokenizerFast, *, cache_dir: Path, add_special_tokens: bool = False
) -> TokenStore:
    """Tokenise every document of ``source``, or open the store if that was done before.

    A document is the tokens of its text and, if the tokenizer has one, the end-of-text token. The store's folder is
    named by a hash of all that decides its content, and appears in one step when it is complete.

    Args:
        source: The documents.
        tokenizer: A fast tokenizer.
        cache_dir: Folder of all stores; made if need be.
        add_special_tokens: Whether the tokenizer puts its special tokens around each document.

    Raises:
        ValueError: If ``cache_dir`` cannot be written, or a document is not fit for training (the message names it).
    """
    recipe = _recipe(source, tokenizer, add_special_tokens)
    folder = cache_dir / sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    if not folder.exists():
        writable_folder(cache_dir)
        with atomic_folder(folder) as temporary:
            _write(temporary, source, tokenizer, recipe)
    return TokenStore(folder)


def _recipe(source: Source, tokenizer: PreTrainedTokenizerFast, add_special_tokens: bool) -> dict[str, Any]:
    vocabulary = vocabulary_size(tokenizer)
    return {
        "format": FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer_hash(tokenizer),
        "add_special_tokens": add_special_tokens,
        "end_of_text": tokenizer.eos_token_id,
        "vocabulary_size": vocabulary,
        "dtype": "<u2" if vocabulary <= 2**16 else "<u4",
    }


def _write(folder: Path, source: Source, tokenizer: PreTrainedTokenizerFast, recipe: dict[str, Any]) -> None:
    """Write the three files of a store."""
    lengths: list[int] = []
    with (folder / TOKENS).open("wb") as file, _progress_bar() as bar:
        for texts in _batches(source):
            written = _write_batch(file, texts, tokenizer, recipe)
            lengths += written
            bar.set_postfix(documents=f"{len(lengths):,}", refresh=False)
            bar.update(sum(written))
    borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8")
    np.save(folder / DOCUMENT_BORDERS, borders, allow_pickle=False)
    counts = {"documents": len(lengths), "tokens": int(borders[-1]), "bytes": (folder / TOKENS).stat().st_size}
    (folder / MANIFEST).write_text(json.dumps(recipe | counts, indent=2) + "\n")
    _log.info("Tokenised %d documents into %d tokens.", len(lengths), borders[-1])


def _write_batch(
    file: BinaryIO, texts: list[str], tokenizer: PreTrainedTokenizerFast, recipe: dict[str, Any]
) -> list[int]:
    """Append the tokens of some documents and return how many each has."""
    # The backend itself: it does not warn of a "maximum sequence length", which means nothing for rows cut later.
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=recipe["add_special_tokens"])
    lengths = []
    for encoding in encodings:
        ids = np.array(_with_end_of_text(encoding.ids, recipe["end_of_text"]), dtype=np.int64)
        if ids.size and ids.max() >= recipe["vocabulary_size"]:
            raise ValueError(
                f"The tokenizer gave token {ids.max()}, beyond its vocabulary of {recipe['vocabulary_size']}."
                " Its tokenizer.json is inconsistent: fetch it again."
            )
        file.write(ids.astype(recipe["dtype"]).tobytes())
        lengths.append(len(ids))
    return lengths


def _with_end_of_text(ids: list[int], end_of_text: int | None) -> list[int]:
    """Mark where the document ends, once: with special tokens some tokenizers already do."""
    return ids if end_of_text is None or ids[-1:] == [end_of_text] else [*ids, end_of_text]


def _batches(source: Source) -> Iterator[list[str]]:
    """Texts in groups large enough for all the tokenizer's threads and small enough for memory."""
    texts: list[str] = []
    characters = 0
    for document in source:
        texts.append(document.text)
        characters += len(document.text)
        if len(texts) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _progress_bar() -> tqdm:
    # `None` hides the bar where nobody watches a terminal.
    hidden = True if getattr(rank_zero_only, "rank", 0) else None
    return tqdm(desc="Tokenising", unit=" tokens", unit_scale=True, disable=hidden)
