"""Character offsets for tokenizers that do not report them (written in Python, mistral-common), found by decoding."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

_LONGEST_GROUP = 64
"""Maximum number of tokens that share a character. If more tokens add no text, they are not tokens of this text."""

_SAMPLE = "The cat sat on the mat."
_INCOMPLETE = "\ufffd"
"""Many decoders return this for an incomplete character. A text may also contain it."""


class SlowBackend:
    """Gives a slow tokenizer the interface of a fast tokenizer's ``backend_tokenizer``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = f"The tokenizer '{name}' ({type(tokenizer).__name__})"
        # Special tokens in a text: some decoders must keep them, others would show how they spell tokens internally.
        sample = self.encode(_SAMPLE, add_special_tokens=False).ids
        self._skips = self.decode(sample, skip_special_tokens=False) != _SAMPLE
        self.offsets(sample, _SAMPLE)

    def encode(self, text: str, add_special_tokens: bool = True) -> "SlowEncoding":
        """Encode a text; offsets are computed on first access."""
        plain = list(self._tokenizer.encode(text, add_special_tokens=False))
        ids = list(self._tokenizer.encode(text, add_special_tokens=True)) if add_special_tokens else plain
        first = next((i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain), None)
        if first is None:
            raise ValueError(f"{self._name} tokenizes a text differently when it adds special tokens.")
        return SlowEncoding(ids, slice(first, first + len(plain)), text, self)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list["SlowEncoding"]:
        """Encode texts one after the other."""
        return [self.encode(text, add_special_tokens) for text in texts]

    encode_batch_fast = encode_batch

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens with the tokenizer itself."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def id_to_token(self, index: int) -> str | None:
        """Return the token with this id, or None if the vocabulary does not have it."""
        return self._tokens.get(index)

    def to_str(self) -> str:
        """Return everything that determines the tokens of a text, as JSON with a hash of each file of the tokenizer."""
        content = {"decoder": {"type": type(self._tokenizer).__name__}, "added_tokens": [], "files": self._files}
        return json.dumps(content, sort_keys=True)

    def offsets(self, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """Return the character span of each token; tokens that share a character all get the span of their group."""
        found, reached = decoded_offsets(lambda part: self.decode(part, self._skips), ids, text)
        if reached < len(text) or len(found) < len(ids):
            raise ValueError(
                f"{self._name} does not report character offsets, and its tokens do not decode to the text from"
                f" character {reached} on ({text[reached : reached + 20]!r}), so key tokens cannot be located: use its"
                " fast version (a folder with tokenizer.json)."
            )
        return found

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {index: token for token, index in self._tokenizer.get_vocab().items()}

    @cached_property
    def _files(self) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            hashes = {}
            for path in sorted(Path(folder).iterdir()):
                content = path.read_bytes()
                if path.suffix == ".json" and isinstance(settings := json.loads(content), dict):
                    settings.pop("name_or_path", None)  # where it was loaded from
                    content = json.dumps(settings, sort_keys=True).encode()
                hashes[path.name] = hashlib.sha256(content).hexdigest()
            return hashes


class SlowEncoding:
    """Token ids of a text, and the characters of each; added special tokens have empty spans."""

    def __init__(self, ids: list[int], own: slice, text: str, backend: SlowBackend) -> None:
        self.ids = ids
        self._own, self._text, self._backend = own, text, backend

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Character spans ``(start, end)`` of all tokens; raises a ``ValueError`` if they do not decode to the text."""
        before, after = self._own.start, len(self.ids) - self._own.stop
        spans = self._backend.offsets(self.ids[self._own], self._text)
        return [*before * [(0, 0)], *spans, *after * [(0, 0)]]


def decoded_offsets(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], text: str
) -> tuple[list[tuple[int, int]], int]:
    """Find the character span of each token from the text that it adds to the decoded tokens before it.

    Each token is decoded with the preceding ones, because some decoders drop a space at the start. Tokens are grouped
    until they form complete characters: for part of a character, decoders return U+FFFD or nothing.

    Returns:
        The spans of all tokens before the first difference from the text, and the character where it begins.
    """
    spans: list[tuple[int, int]] = []
    context, known, position = 0, "", 0  # first token of the context, the text of the context, and where it ends
    for stop in range(1, len(ids) + 1):
        decoded = decode(ids[context:stop])
        piece = decoded[len(known) :]
        matches = bool(piece) and decoded.startswith(known) and text.startswith(piece, position)
        if matches and not (piece.endswith(_INCOMPLETE) and _is_incomplete(decode, ids, context, stop)):
            start = len(spans)
            spans += (stop - start) * [(position, position + len(piece))]
            context, position = start, position + len(piece)
            known = decode(ids[context:stop])
        elif stop - len(spans) > _LONGEST_GROUP:
            break
    if position == len(text):  # the remaining tokens have no text
        spans += (len(ids) - len(spans)) * [(position, position)]
    return spans, position


def _is_incomplete(decode: Callable[[Sequence[int]], str], ids: Sequence[int], context: int, stop: int) -> bool:
    """Return whether a final U+FFFD is an incomplete character, although the text also contains U+FFFD there.

    If so, one of the next two tokens completes the character: alone it has text, but it adds none here.
    """
    length = len(decode(ids[context:stop]))
    return any(
        decode(ids[stop:end]) and len(decode(ids[context:end])) <= length
        for end in range(stop + 1, min(stop + 2, len(ids)) + 1)
    )
