"""Tokenize a corpus once, into a folder that is either complete or missing."""

import json
import logging
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.sources.documents import Source, text_bytes, with_text
from datamodules.token_store.tokenize import DocumentEncoder, tokenized
from lightning_modules.utilities.files import atomic_folder, remove_folder, writable_folder
from lightning_modules.utilities.identity import file_crc32, file_state
from lightning_modules.utilities.locks import exclusive
from lightning_modules.utilities.progress import progress_bar

FORMAT = 4
"""Version of the files, part of every store's folder name. Increase it with any change to their content."""

MANIFEST = "manifest.json"
TOKENS = "tokens.bin"
DOCUMENT_BOUNDARIES = "document_borders.bin"
PROMPT_SPANS = "prompt_spans.bin"  # two `<i8` per run of prompt tokens; written only if a document has a prompt
VERIFIED = "verified.json"  # sizes and times of the files when they were last verified; not part of the content
_CONTENT = (TOKENS, DOCUMENT_BOUNDARIES)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """Memory-mapped tokenized corpus: a flat stream of tokens, and the end of each document in it.

    Opening a store checks everything but the tokens, which may be hundreds of gigabytes: `verify` checks those. It
    pickles as its path, so loader workers may be forked or spawned.
    """

    folder: Path

    def __post_init__(self) -> None:
        with _damage_named(self.folder):
            for name, size in self.manifest["bytes"].items():
                found = (self.folder / name).stat().st_size
                if found != size:
                    raise ValueError(f"{name} has {found:,} of {size:,} bytes")
            for name in self.manifest["crc32"]:
                if name != TOKENS:
                    self._check_content(name)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Sizes and checksums of the files, and everything that decides their content."""
        content = (self.folder / MANIFEST).read_bytes()
        try:
            manifest = json.loads(content)
            whole = content == _manifest_text({name: manifest[name] for name in manifest if name != "checksum"})
        except (ValueError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{MANIFEST} does not match its checksum")
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
    def prompt_spans(self) -> NDArray[np.int64] | None:
        """``[s, 2]`` ascending start and stop in ``tokens`` of each run of prompt tokens; None without any."""
        if PROMPT_SPANS not in self.manifest["bytes"]:
            return None
        return np.memmap(self.folder / PROMPT_SPANS, dtype="<i8", mode="r").view(np.ndarray).reshape(-1, 2)

    def verify(self) -> None:
        """Compare the tokens with their checksum, unless inodes, sizes and times are those of the last verification."""
        with _damage_named(self.folder):
            state = {name: file_state(self.folder / name) for name in _CONTENT}
            with suppress(OSError, ValueError):  # the file is missing or torn
                if state == json.loads((self.folder / VERIFIED).read_text()):
                    return
            self._check_content(TOKENS)
        with suppress(OSError):  # the store may belong to another user
            (self.folder / VERIFIED).write_text(json.dumps(state))

    def _check_content(self, name: str) -> None:
        if file_crc32(self.folder / name) != self.manifest["crc32"][name]:
            raise ValueError(f"{name} does not match its checksum")

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        return type(self), (self.folder,)


def build_token_store(source: Source, encoder: DocumentEncoder, *, cache_dir: Path) -> TokenStore:
    """Tokenize every document of ``source``, or open an undamaged store of an earlier call.

    The store's folder is named by a hash of everything that decides its content, and appears atomically when it is
    complete. If several processes need the same store, one tokenizes while the others wait.
    """
    recipe = _make_recipe(source, encoder)
    folder = cache_dir / sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    if folder.exists():
        with suppress(ValueError):
            return _open_verified(folder)
    writable_folder(cache_dir)
    with exclusive(folder):
        if folder.exists():  # damaged, or written by another process in the meantime
            try:
                return _open_verified(folder)
            except ValueError as error:
                _log.warning("The token store %s is damaged (%s): rebuilding it.", folder, error.__cause__)
            remove_folder(folder)
        with atomic_folder(folder) as temporary:
            _write_store(temporary, source, encoder, recipe)
            if source.fingerprint() != recipe["source"]:
                raise ValueError(
                    "The training text changed during tokenization. Start again when no other process writes to it."
                )
        return TokenStore(folder)


def _open_verified(folder: Path) -> TokenStore:
    store = TokenStore(folder)
    store.verify()
    return store


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = "Start the run again to rebuild it."
        raise ValueError(f"The token store {folder} is damaged ({error}). {remedy}") from error


def _make_recipe(source: Source, encoder: DocumentEncoder) -> dict[str, Any]:
    vocabulary = encoder.recipe["vocabulary_size"]
    return {
        "format": FORMAT,
        "source": source.fingerprint(),
        **encoder.recipe,
        "dtype": "<u2" if vocabulary <= 2**16 else "<u4",
    }


def _write_store(folder: Path, source: Source, encoder: DocumentEncoder, recipe: dict[str, Any]) -> None:
    documents = tokens = checksum = 0
    largest = -1
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
            prompts.append(tokens + batch.prompt_spans)
            largest = max(largest, int(batch.tokens.max(initial=-1)))
            documents += len(batch.lengths)
            tokens += len(batch.tokens)
            bar.set_postfix(documents=f"{documents:,}", tokens=f"{tokens:,}", refresh=False)
            bar.update(batch.text_bytes)
    optional = []
    if any(map(len, prompts)):
        optional.append(PROMPT_SPANS)
        (folder / PROMPT_SPANS).write_bytes(np.concatenate(prompts).astype("<i8").tobytes())
    manifest = recipe | {
        "documents": documents,
        "tokens": tokens,
        "largest_token": largest,
        "bytes": {name: (folder / name).stat().st_size for name in (*_CONTENT, *optional)},
        "crc32": {TOKENS: checksum} | {name: file_crc32(folder / name) for name in (DOCUMENT_BOUNDARIES, *optional)},
    }
    (folder / MANIFEST).write_bytes(_manifest_text(manifest))
    state = {name: file_state(folder / name) for name in _CONTENT}
    (folder / VERIFIED).write_text(json.dumps(state))
    _log.info("Tokenized %d documents into %d tokens.", documents, tokens)


def _manifest_text(manifest: dict[str, Any]) -> bytes:
    """Serialize the manifest with its own checksum. Equal manifests have equal text, so any edit is detected."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    return (json.dumps(manifest | {"checksum": checksum}, indent=2) + "\n").encode()
