"""Text to tokens that remember which characters they stand for."""

import hashlib
import json
import re
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.slow_tokenizers import SlowBackend


def load_tokenizer(
    pretrained_model_name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer that tells which characters each token stands for.

    Args:
        pretrained_model_name_or_path: A hub id or a local folder.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run code from the tokenizer's repository; off unless you trust it.

    Raises:
        ValueError: If it cannot be found or gives no offsets.
    """
    pretrained_model_name_or_path = local_or_hub(pretrained_model_name_or_path, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            pretrained_model_name_or_path, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of a damaged tokenizer.json `tokenizers` raises a bare Exception
        raise ValueError(not_loaded("tokenizer", pretrained_model_name_or_path, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        tokenizer.backend_tokenizer = SlowBackend(tokenizer, pretrained_model_name_or_path)
    # A stored truncation would cut documents, and the first call would change what `tokenizer_hash` sees.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    _check_offsets(tokenizer, pretrained_model_name_or_path)
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of all that decides which tokens a text becomes."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def tokenizer_to_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """All that `tokenizer_from_json` makes an equal tokenizer of."""
    return json.dumps({"tokenizer": tokenizer.backend_tokenizer.to_str(), "special": tokenizer.special_tokens_map})


def tokenizer_from_json(text: str) -> PreTrainedTokenizerFast:
    """The tokenizer that `tokenizer_to_json` described; nothing of it is run.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        content = json.loads(text)
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(content["tokenizer"]), **content["special"])
    except Exception as error:  # `tokenizers` raises a bare Exception
        raise ValueError(f"The stored tokenizer is damaged ({error}).") from error


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest token id; ``len(tokenizer)`` is less where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def warn_of_other_tokenizer(tokenizer: PreTrainedTokenizerFast, model: str, revision: str | None = None) -> None:
    """Warn if tokens are others to the model than to the tokenizer of the data: training would go on in silence.

    Sizes say nothing, as many embeddings are padded: what counts is which token has which index in the model's own
    tokenizer. A model that comes without one is not asked, nor one whose tokenizer runs code.

    Args:
        tokenizer: Of the data.
        model: Hub id or folder of the model, which has stored weights.
        revision: Branch, tag or commit on the hub.
    """
    try:
        own = {index: token for token, index in load_tokenizer(model, revision=revision).get_vocab().items()}
    except ValueError:
        return
    other = sum(own.get(index, token) != token for token, index in tokenizer.get_vocab().items())
    if other:
        warnings.warn(
            f"{other:,} of the {vocabulary_size(tokenizer):,} tokens of the data's tokenizer"
            f" '{tokenizer.name_or_path or type(tokenizer).__name__}' are others in that of the model '{model}': it is"
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
    """One document as a batch of one row.

    Args:
        text: The document.
        tokenizer: A fast tokenizer.
        name: How messages and results cite the document.
        add_special_tokens: Whether the tokenizer adds its own, such as a first ``<s>``; they have empty offsets.
        max_tokens: Tokens to keep; the text is cut behind the last one kept.

    Returns:
        ``[1, T]`` row with ``text``, ``offsets`` and ``names``. All tokens but the first are scored.

    Raises:
        ValueError: If the text is empty or white space only, has no token, or holds a lone surrogate.
    """
    if not text.strip():
        raise ValueError(f"Document '{name}' is empty: there is nothing to score. Remove it or check its path.")
    # The backend itself: it does not warn of a "maximum sequence length" before the row is cut.
    try:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise ValueError(
            f"Document '{name}' is no Unicode text: it holds a lone surrogate. Read its file with `errors='replace'`."
        ) from error
    input_ids = torch.tensor([encoding.ids[:max_tokens]], dtype=torch.int64)
    offsets = torch.tensor([encoding.offsets[:max_tokens]], dtype=torch.int64)
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError(f"The tokenizer '{tokenizer.name_or_path}' finds no token in document '{name}'.")
    unknown = 0.0 if tokenizer.unk_token_id is None else input_ids.eq(tokenizer.unk_token_id).float().mean().item()
    if unknown > 0.1:
        warnings.warn(
            f"{unknown:.0%} of the tokens of document '{name}' are unknown to the tokenizer '{tokenizer.name_or_path}':"
            " it is made for other text, and scores mean little.",
            stacklevel=2,
        )
    if length < len(encoding.ids):
        text = text[: int(offsets[..., 1].max())]
    labels = input_ids.clone()
    labels[:, 0] = IGNORE_INDEX
    return PackedBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.arange(length).unsqueeze(0),
        document_borders=[[0, length]],
        text=[text],
        offsets=offsets,
        names=[name],
    )


def local_or_hub(path_or_id: str, kind: str) -> str:
    """A local path, with its ``~`` expanded, or a hub id; a ``ValueError`` for what can be neither."""
    if not path_or_id or "\0" in path_or_id:
        raise ValueError(f"No {kind} at {path_or_id!r}: give a local folder or a hub id.")
    local = Path(path_or_id).expanduser()
    if local.exists():
        return str(local)
    if path_or_id.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_id):
        raise ValueError(f"No {kind} at '{path_or_id}': there is no such file or folder. Check the path.")
    return path_or_id


def _check_offsets(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Some versions of `tokenizers` give every token of byte-level vocabularies a span of no characters."""
    offsets = tokenizer.backend_tokenizer.encode("The cat sat on the mat.", add_special_tokens=False).offsets
    if offsets and not any(end > start for start, end in offsets):
        raise ValueError(f"The tokenizer '{name}' gives no character offsets: update the package `tokenizers`.")


def not_loaded(kind: str, path: str, error: Exception) -> str:
    """Message for a model or tokenizer that transformers could not load."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedy = "Give a local folder, or a hub id that exists and that this machine can reach or has in its cache."
    if kind == "model" and (Path(path) / "adapter_config.json").exists():
        remedy = "It holds adapters without their model: export them merged (`longce export`)."
    return f"The {kind} '{path}' could not be loaded: {reason.rstrip('.')}. {remedy}"
