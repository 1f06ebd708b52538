"""Tokenization of texts, with the characters of each token."""

import hashlib
import json
import re
import warnings
from pathlib import Path
from weakref import WeakSet

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, pack_sequence
from lightning_modules.functional import character_units, unit_spans
from lightning_modules.models.loading.gguf.conversion import model_folder
from lightning_modules.models.tokenization.encoding import EncodedText, encode_text, panics_caught
from lightning_modules.models.tokenization.expansion import check_expansion

_TOKENIZER_FILES = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of file names, one of which matches in every folder with a tokenizer."""

_PROBE = "The cat sat on 1234 mats.\n\n  def f(x):\treturn 'don't'  # 北京, été 😀"
"""Text in which tokenizers differ: digits, white space, contractions, accents, characters of several bytes."""

_reported_tokenizers: WeakSet[PreTrainedTokenizerFast] = WeakSet()
"""Tokenizers that a warning has already reported."""


def load_tokenizer(
    pretrained_model_name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    trimmed_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """Load a tokenizer that reports the characters of each token.

    By default, offsets cover every character of a token. With ``trimmed_offsets``, tokenizers that are stored with this
    setting (GPT-NeoX and RoBERTa) leave out spaces, as in the authors' code.
    """
    pretrained_model_name_or_path = model_folder(pretrained_model_name_or_path, "tokenizer")
    check_expansion(pretrained_model_name_or_path, revision)
    try:
        with panics_caught():
            tokenizer = AutoTokenizer.from_pretrained(
                pretrained_model_name_or_path, revision=revision, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # `tokenizers` raises a bare Exception for a damaged tokenizer.json
        raise ValueError(not_loaded("tokenizer", pretrained_model_name_or_path, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"The tokenizer '{pretrained_model_name_or_path}' ({type(tokenizer).__name__}) does not report the"
            " characters of its tokens: use its fast version, a folder with tokenizer.json, or that of a model with the"
            " same vocabulary (`--evaluator_tokenizer`, `--model_tokenizer`, `data.tokenizer`)."
        )
    if not _is_stored(tokenizer, pretrained_model_name_or_path, revision):
        warnings.warn(
            f"transformers would load '{pretrained_model_name_or_path}' as {type(tokenizer).__name__}, which splits"
            " text differently from its tokenizer.json: the latter is used.",
            stacklevel=2,
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path, revision=revision)
    # Stored truncation would cut documents, and the first call would reset it and change `tokenizer_hash`.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if not trimmed_offsets:
        untrim_offsets(tokenizer)
    return tokenizer


@panics_caught()
def _is_stored(tokenizer: PreTrainedTokenizerFast, path: str, revision: str | None) -> bool:
    """Return whether a tokenizer splits text like its ``tokenizer.json``; True if the file is missing.

    For models of type ``qwen2``, transformers 5 builds a tokenizer from the vocabulary and ignores the rest.
    """
    file = cached_file(path, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    # Ids of one text are compared, because the two differ in ways that their JSON does not show.
    backends = [tokenizer.backend_tokenizer, *([] if file is None else [Tokenizer.from_file(file)])]
    return len({tuple(backend.encode(_PROBE, add_special_tokens=False).ids) for backend in backends}) == 1


def untrim_offsets(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make a tokenizer's offsets cover every character of a token, including spaces.

    With trimmed offsets, a token of white space has no characters and could never be a key token.
    """
    backend = tokenizer.backend_tokenizer
    if backend.post_processor is None:
        return
    specification = json.loads(backend.post_processor.__getstate__())
    processors = specification.get("processors", [specification])
    if any(processor.get("trim_offsets") for processor in processors):
        for processor in processors:
            processor |= {"trim_offsets": False} if "trim_offsets" in processor else {}
        # Only a complete tokenizer can be read from JSON.
        whole = json.loads(Tokenizer(BPE()).to_str()) | {"post_processor": specification}
        backend.post_processor = Tokenizer.from_str(json.dumps(whole)).post_processor


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of everything that determines the tokens of a text."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def tokenizer_to_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """Serialize a tokenizer for `tokenizer_from_json`."""
    return json.dumps({"tokenizer": tokenizer.backend_tokenizer.to_str(), "special": tokenizer.special_tokens_map})


def tokenizer_from_json(text: str) -> PreTrainedTokenizerFast:
    """Load the result of `tokenizer_to_json` without running code; raise a ``ValueError`` if it is damaged."""
    try:
        content = json.loads(text)
        with panics_caught():
            backend = Tokenizer.from_str(content["tokenizer"])
        return PreTrainedTokenizerFast(tokenizer_object=backend, **content["special"])
    except Exception as error:  # `tokenizers` raises a bare Exception
        raise ValueError(f"The stored tokenizer is damaged ({error}).") from error


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest token id plus one; ``len(tokenizer)`` is smaller if ids are skipped."""
    return max(tokenizer.get_vocab().values()) + 1


def warn_of_other_tokenizer(tokenizer: PreTrainedTokenizerFast, model: str, revision: str | None = None) -> None:
    """Warn if the tokenizer of the data differs from that of the model with this hub id or folder.

    Tokens are compared by index, because sizes differ if embeddings are padded. Models without a tokenizer, or with one
    that runs code, are not checked.
    """
    try:
        own = {index: token for token, index in load_tokenizer(model, revision=revision).get_vocab().items()}
    except ValueError:
        return
    other = sum(own.get(index, token) != token for token, index in tokenizer.get_vocab().items())
    if other:
        warnings.warn(
            f"{other:,} of the {vocabulary_size(tokenizer):,} tokens of the data's tokenizer"
            f" '{tokenizer.name_or_path or type(tokenizer).__name__}' differ from those of the model '{model}': it is"
            " another model's tokenizer. Set `data.tokenizer` to the model's.",
            stacklevel=2,
        )


def encode_document(
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    name: str = "document",
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
) -> PackedBatch:
    """Return one document as a batch of one ``[1, T]`` row, with all keys of an evaluation but ``sets``.

    All tokens but the first are scored. A text of more than ``max_tokens`` is cut after the last complete character,
    and tokenized again, so that its tokens are those of the text that it returns. Special tokens that the tokenizer
    adds before the text, such as ``<s>``, have empty offsets and are not scored; those after it are left out.
    """
    if not text.strip():
        raise ValueError(f"Document '{name}' is empty: there is nothing to score. Remove it or check its path.")
    encoded = encode_text(text, tokenizer, name=name, add_special_tokens=add_special_tokens)
    # A loop, because a cut text may have more tokens than before: its last word has lost its end.
    while (end := _cut(encoded, max_tokens)) is not None:
        text = text[:end]
        if not text.strip():
            raise ValueError(
                f"The first `max_tokens` = {max_tokens} tokens of document '{name}' are white space: increase it."
            )
        encoded = encode_text(text, tokenizer, name=name, add_special_tokens=add_special_tokens)
    ids = torch.tensor(encoded.ids[:max_tokens], dtype=torch.int64)
    offsets = torch.tensor(encoded.offsets[:max_tokens], dtype=torch.int64)
    if len(ids) == encoded.added:
        raise ValueError(f"The tokenizer '{tokenizer.name_or_path}' finds no token in document '{name}'.")
    _warn_of_unread_text(text, ids, offsets, tokenizer, name)
    batch = pack_sequence([ids])
    batch["labels"][:, : encoded.added] = IGNORE_INDEX
    batch["scored"][:, : encoded.added] = False
    return PackedBatch(
        **batch,
        text=[text],
        offsets=offsets.unsqueeze(0),
        names=[name],
        special_tokens=[add_special_tokens],
    )


def _warn_of_unread_text(
    text: str, ids: Tensor, offsets: Tensor, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    """Warn, once per tokenizer, if many tokens are unknown or many characters are dropped."""
    # Byte-level tokenizers have no unknown token.
    unknown = 0.0 if tokenizer.unk_token_id is None else ids.eq(tokenizer.unk_token_id).float().mean().item()
    covered = int(unit_spans(offsets, character_units(offsets)).diff(dim=1).sum())
    # Many tokenizers leave out white space, so it does not count as uncovered.
    drops = covered < 0.9 * len("".join(text.split()))
    if tokenizer in _reported_tokenizers or not (unknown > 0.1 or drops):
        return
    _reported_tokenizers.add(tokenizer)
    warnings.warn(
        f"{unknown:.0%} of the tokens of document '{name}' are unknown to the tokenizer '{tokenizer.name_or_path}', and"
        f" its tokens cover {covered:,} of the {len(text):,} characters: it is not meant for such text, and scores are"
        " not meaningful. Further documents are not reported.",
        stacklevel=3,
    )


def _cut(encoded: EncodedText, max_tokens: int | None) -> int | None:
    """Return the number of complete characters in the first tokens, or None if the text need not be cut."""
    if max_tokens is None or len(encoded.ids) <= max_tokens:
        return None
    offsets = encoded.offsets
    # A character whose bytes are in several tokens must not be divided.
    left_out = [start for start, end in offsets[max_tokens:] if end > start]
    if not left_out:
        return None
    return min(max((end for _, end in offsets[:max_tokens]), default=0), *left_out)


def not_loaded(kind: str, path: str, error: Exception, *, plan: str = "") -> str:
    """Return the message for a model or tokenizer that transformers could not load.

    ``plan`` is the file that is enough for ``longce plan``.
    """
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    enough = f"; for `longce plan`, `hf download {path} {plan}` is enough" if plan else ""
    remedy = f"Download it where there is a network (`hf download {path}`{enough}),"
    remedy += " or give a local folder or another hub id."
    if kind == "tokenizer" and re.search("sentencepiece|tiktoken|protobuf", str(error), re.IGNORECASE):
        remedy = "Install the extra `tokenizers`, which reads tokenizers without tokenizer.json."
    if kind == "tokenizer" and Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in _TOKENIZER_FILES):
        reason = "its folder has no tokenizer files, such as tokenizer.json"
        remedy = "Copy them from the original model, or name a folder that has them."
    return f"The {kind} '{path}' could not be loaded: {reason.rstrip('.')}. {remedy}"
