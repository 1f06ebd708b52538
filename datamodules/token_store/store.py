"""Tokenize a corpus once, into a folder that is either complete or missing."""

import json
import logging
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from datamodules.sources.documents import Source, text_bytes, with_text
from datamodules.token_store.tokenize import Encoder, tokenized
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash, vocabulary_size
from lightning_modules.utilities.files import atomic_folder, remove_folder, writable_folder
from lightning_modules.utilities.identity import file_state
from lightning_modules.utilities.locks import exclusive
from lightning_modules.utilities.progress import progress_bar

FORMAT = 3
"""Part of every store's address: raise it with any change to what the code below writes."""

MANIFEST, TOKENS, DOCUMENT_BOUNDARIES = "manifest.json", "tokens.bin", "document_borders.bin"
PROMPT_LENGTHS = "prompt_lengths.bin"  # one `<i8` for each document; only where a document has a prompt
VERIFIED = "verified.json"  # sizes and times of the files when they were last found undamaged; not part of the content
_CONTENT = (TOKENS, DOCUMENT_BOUNDARIES)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """A tokenized corpus on disk, memory-mapped: a flat stream of tokens and where each document ends in it.

    Opening it checks all but the tokens, which may be hundreds of gigabytes: `verify` checks those. It pickles as its
    path, so loader workers may be forked or spawned.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            for name, size in self.manifest["bytes"].items():
                if (found := (self.folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {found:,} of {size:,} bytes")
            for name in self.manifest["crc32"]:
                if name != TOKENS:
                    self._check_content(name)
        except (OSError, ValueError) as error:
            raise ValueError(_damage_message(self.folder, error)) from error

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Size of the store, and all that decides its content."""
        content = (self.folder / MANIFEST).read_bytes()
        try:
            manifest = json.loads(content)
            whole = content == _manifest_text({name: manifest[name] for name in manifest if name != "checksum"})
        except (ValueError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{MANIFEST} is not what was written")
        return manifest

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """Token ids of all documents one after the other."""
        return np.memmap(self.folder / TOKENS, dtype=self.manifest["dtype"], mode="r").view(np.ndarray)

    @cached_property
    def document_boundaries(self) -> NDArray[np.int64]:
        """``[documents + 1]`` ascending indices ``[0, end of document 1, ..]`` into ``tokens``."""
        return np.memmap(self.folder / DOCUMENT_BOUNDARIES, dtype="<i8", mode="r").view(np.ndarray)

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64] | None:
        """``[documents]`` tokens at the front of each document that are its prompt; None if none has one."""
        if PROMPT_LENGTHS not in self.manifest["bytes"]:
            return None
        return np.memmap(self.folder / PROMPT_LENGTHS, dtype="<i8", mode="r").view(np.ndarray)

    def verify(self) -> None:
        """Compare the tokens with their checksum, unless inodes, sizes and times are those last found undamaged."""
        try:
            state = {name: file_state(self.folder / name) for name in _CONTENT}
            with suppress(OSError, ValueError):  # without the note, or with a torn one
                if state == json.loads((self.folder / VERIFIED).read_text()):
                    return
            self._check_content(TOKENS)
        except (OSError, ValueError) as error:
            raise ValueError(_damage_message(self.folder, error)) from error
        with suppress(OSError):  # another user's
            (self.folder / VERIFIED).write_text(json.dumps(state))

    def _check_content(self, name: str) -> None:
        if _file_checksum(self.folder / name) != self.manifest["crc32"][name]:
            raise ValueError(f"{name} is not what was written")

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        return type(self), (self.folder,)


def build_token_store(
    source: Source, tokenizer: PreTrainedTokenizerFast, *, cache_dir: Path, add_special_tokens: bool = False
) -> TokenStore:
    """Tokenize every document of ``source``, or open the store if that was done before and it is undamaged.

    A document is the tokens of its text and, if the tokenizer has one, the end-of-text token. The store's folder is
    named by a hash of all that decides its content, and appears in one step when it is complete. If several processes
    need the same store, one tokenizes while the others wait.
    """
    recipe = _make_recipe(source, tokenizer, add_special_tokens)
    folder = cache_dir / sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    if folder.exists():
        with suppress(ValueError):
            return _open_verified(folder)
    writable_folder(cache_dir)
    with exclusive(folder):
        if folder.exists():  # damaged, or made by the process that we have waited for
            try:
                return _open_verified(folder)
            except ValueError as error:
                _log.warning("The token store %s is damaged (%s): building it again.", folder, error.__cause__)
            remove_folder(folder)
        with atomic_folder(folder) as temporary:
            _write_store(temporary, source, tokenizer, recipe)
            if source.fingerprint() != recipe["source"]:
                raise ValueError(
                    "The training text changed while it was tokenized. Start again when nothing writes to it."
                )
        return TokenStore(folder)


def _open_verified(folder: Path) -> TokenStore:
    store = TokenStore(folder)
    store.verify()
    return store


def _damage_message(folder: Path, reason: Exception) -> str:
    return f"The token store {folder} is damaged ({reason}). Prepare the data again: it is then rebuilt."


def _make_recipe(source: Source, tokenizer: PreTrainedTokenizerFast, add_special_tokens: bool) -> dict[str, Any]:
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


def _write_store(folder: Path, source: Source, tokenizer: PreTrainedTokenizerFast, recipe: dict[str, Any]) -> None:
    encoder = Encoder(tokenizer, add_special_tokens=recipe["add_special_tokens"])
    documents = tokens = checksum = 0
    prompts: list[NDArray[np.int64]] = []
    with (
        (folder / TOKENS).open("wb") as token_file,
        (folder / DOCUMENT_BOUNDARIES).open("wb") as borders_file,
        progress_bar("Tokenizing", unit="B", total=text_bytes(source)) as bar,
        closing(tokenized(with_text(source), encoder)) as batches,
    ):
        borders_file.write(bytes(8))
        for batch in batches:
            content = batch.tokens.astype(recipe["dtype"]).tobytes()
            token_file.write(content)
            checksum = zlib.crc32(content, checksum)
            borders_file.write((tokens + np.cumsum(batch.lengths)).astype("<i8").tobytes())
            prompts.append(batch.prompt_lengths)
            documents, tokens = documents + len(batch.lengths), tokens + len(batch.tokens)
            bar.set_postfix(documents=f"{documents:,}", tokens=f"{tokens:,}", refresh=False)
            bar.update(batch.text_bytes)
    optional = (PROMPT_LENGTHS,) if any(part.any() for part in prompts) else ()
    if optional:
        (folder / PROMPT_LENGTHS).write_bytes(np.concatenate(prompts).astype("<i8").tobytes())
    manifest = recipe | {
        "documents": documents,
        "tokens": tokens,
        "bytes": {name: (folder / name).stat().st_size for name in (*_CONTENT, *optional)},
        "crc32": {TOKENS: checksum}
        | {name: _file_checksum(folder / name) for name in (DOCUMENT_BOUNDARIES, *optional)},
    }
    (folder / MANIFEST).write_bytes(_manifest_text(manifest))
    state = {name: file_state(folder / name) for name in _CONTENT}
    (folder / VERIFIED).write_text(json.dumps(state))
    _log.info("Tokenized %d documents into %d tokens.", documents, tokens)


def _manifest_text(manifest: dict[str, Any]) -> bytes:
    """Serialize the manifest with its own checksum; equal manifests are equal text, so that any edit is noticed."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    return (json.dumps(manifest | {"checksum": checksum}, indent=2) + "\n").encode()


def _file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(1 << 20):
            checksum = zlib.crc32(content, checksum)
    return checksum
