"""Decoding of tokens to text, with the characters of each token."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SAMPLE = "The cat sat on the mat, naïve café; 日本 and 🙂.\n\t12 of 345"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED = re.compile("[\udc80-\udcff]")  # Python's decoding of bytes that are not part of a character


class TokenCharacters:
    """Decodes token ids to text and character spans, even if a sequence starts or ends inside a word or character.

    The bytes of each token come from the vocabulary and do not depend on its neighbors. Byte-level vocabularies (GPT-2,
    Llama 3, Qwen) and those of sentencepiece (Llama 2, Mistral, Gemma) are supported; others raise a ``ValueError``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        specification = json.loads(tokenizer.backend_tokenizer.to_str())
        convert = _converter(specification.get("decoder"))
        vocabulary = tokenizer.get_vocab()
        self.vocabulary_size = max(vocabulary.values()) + 1  # ids may be skipped
        self._bytes = [b""] * self.vocabulary_size
        for token, index in vocabulary.items():
            self._bytes[index] = convert(token)
        for token in specification["added_tokens"]:
            if token["special"]:
                self._bytes[token["id"]] = b""
        # The tokenizer's decoder may drop a space at the start.
        ids = tokenizer.backend_tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
        expected = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        found, _ = self(torch.tensor(ids, dtype=torch.int64))
        if found.lstrip() != expected.lstrip():
            raise ValueError(
                f"The tokens of '{tokenizer.name_or_path}' cannot be decoded one by one ('{expected}' becomes"
                f" '{found}'), so an evaluator with another tokenizer cannot compute their weights: choose one with"
                " the same tokenizer."
            )
        self._adds_space = found.startswith(" ")  # unlike the sample
        ids = tokenizer.backend_tokenizer.encode(f"  {_SAMPLE}", add_special_tokens=False).ids
        found, _ = self(torch.tensor(ids, dtype=torch.int64))
        self._adds_to_spaces = found.startswith("   ")  # also to a text that begins with a space

    def __call__(self, ids: Tensor) -> tuple[str, Tensor]:
        """Return the text of ``[N]`` token ids, and the ``[N, 2]`` int64 character span of each token in it.

        A character with bytes in several tokens belongs to all of them. Special tokens, and bytes of an incomplete
        character, have empty spans.
        """
        pieces = [self._bytes[index] for index in ids.tolist()]
        # Bytes that are not part of a complete character become lone surrogates, which do not occur in texts.
        decoded = b"".join(pieces).decode("utf-8", errors="surrogateescape")
        code = np.frombuffer(decoded.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        whole = (code < 0xDC80) | (code > 0xDCFF)
        # Bytes of each character in UTF-8; a lone surrogate represents one byte.
        width = np.where(whole, 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000), 1)
        before = np.concatenate([[0], np.cumsum(whole)])  # whole characters before each
        of_byte = np.append(np.repeat(np.arange(len(code)), width), len(code))
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        ends = np.cumsum(lengths)
        # From bytes to characters: the first of a token, and the one after its last.
        start = before[of_byte[ends - lengths]]
        last = of_byte[np.maximum(ends, 1) - 1]
        stop = np.where(lengths > 0, before[np.minimum(last + 1, len(code))], start)
        return code[whole].tobytes().decode("utf-32-le"), torch.from_numpy(np.stack([start, stop], axis=1))

    def decode_document(self, ids: Tensor) -> tuple[str, Tensor]:
        """Return text and spans of a whole document, without the space that some tokenizers put before a text.

        They are those that the tokenizer gives for its text, so that an evaluator reads the same text and tokens.
        """
        text, offsets = self(ids)
        # With a single space that may be the text's own, the text is more likely to begin with a word.
        is_added = self._adds_space and (self._adds_to_spaces or not text.startswith("  "))
        if not is_added or text[:1] != " " or len(text) == 1:
            return text, offsets
        start, stop = offsets.unbind(-1)
        # A token of the space alone has the first character, as from the tokenizer.
        first_stop = (stop > start).long()
        spans = torch.stack([(start - 1).clamp(min=0), torch.maximum(stop - 1, first_stop)], dim=1)
        return text[1:], spans


def drop_end_tokens(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return ``[N]`` token ids without the special tokens at their end, such as end of text, which a text has not."""
    ordinary = (~_is_special(ids, tokenizer)).nonzero()
    return ids[: int(ordinary[-1]) + 1] if len(ordinary) else ids[:0]


def count_start_tokens(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of special tokens at the start of ``[N]`` token ids: like those before a text, never scored."""
    ordinary = (~_is_special(ids, tokenizer)).nonzero()
    return int(ordinary[0]) if len(ordinary) else len(ids)


def _is_special(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = tokenizer.special_tokens_map
    # The unknown token represents text, unless it is also that of another role, as in GPT-2.
    if tokenizer.unk_token not in [token for role, token in roles.items() if role != "unk_token"]:
        special.discard(tokenizer.unk_token_id)
    return torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    """Return readable texts of single tokens: bytes of an incomplete character as ``<0xE2>``, special tokens by name.

    An id beyond the vocabulary, as rows of a padded embedding have, is ``<32001>``. Tokenizers that join tokens in an
    unknown way give the entries of the vocabulary.
    """
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        convert = _converter(specification.get("decoder"))
    except ValueError:
        convert = str.encode
    added = {token["id"]: token["content"] for token in specification["added_tokens"]}
    texts = []
    for index in ids:
        token = tokenizer.backend_tokenizer.id_to_token(index)
        if token is None or index in added:
            texts.append(added.get(index, f"<{index}>"))
        else:
            text = convert(token).decode("utf-8", errors="surrogateescape")
            texts.append(_ESCAPED.sub(lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text))
    return texts


_DECODERS = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}


def _converter(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return a function from a token of the vocabulary to the bytes it adds to a text."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    # A regular expression may match across tokens.
    unknown = [part for part in parts if part["type"] not in _DECODERS or "Regex" in part.get("pattern", {})]
    if unknown:
        raise ValueError(
            f"Tokens of a tokenizer with the decoder {unknown[0]} cannot be decoded one by one: choose an evaluator"
            " with the same tokenizer."
        )
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        letters = set(byte_of)
        # Others are added tokens.
        return lambda token: bytes(byte_of[c] for c in token) if letters.issuperset(token) else token.encode()
    if not kinds:
        return lambda token: f" {token}".encode()
    replaced = [_replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")]
    return lambda token: _sentencepiece(token, replaced, bytes_too="ByteFallback" in kinds)


def _replacement(part: dict[str, Any]) -> tuple[str, str]:
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    return part["pattern"]["String"], part["content"]


def _sentencepiece(token: str, replaced: list[tuple[str, str]], *, bytes_too: bool) -> bytes:
    if bytes_too and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()
