"""Tokenizers of GGUF files, which transformers reads in part."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from lightning_modules.models.loading.gguf.metadata import Metadata

_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe")
"""Names of the rule of Llama 3, whose tokenizer takes a word of the vocabulary whole, and begins a text with BOS."""

_RULES = (*_LLAMA_3, "qwen2", "smollm")
"""Rules by which text is split (``tokenizer.ggml.pre``) that tests compare with original tokenizers."""

_READ = (
    "tokens",
    "token_type",
    "scores",
    "merges",
    *(f"{name}_token_id" for name in ("bos", "eos", "unknown", "padding")),
)
"""Values that transformers reads."""

_WITHOUT_EFFECT = (
    *("ggml.add_sep_token", "ggml.token_type_count", "chat_template", "chat_templates", "huggingface.json"),
    *(f"ggml.{name}_token_id" for name in ("eot", "eom", "seperator", "separator", "mask", "cls")),
    *(f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")),
    *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
)
"""Values that do not change the tokens of a text: roles of tokens in chats and gaps, and of other kinds of models."""

_CONTROL = 3
"""Type of tokens that are matched whole, such as BOS."""


def read_tokenizer(
    file: Path, reader: Any, metadata: Metadata, kind_of_config: type[PreTrainedConfig]
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a parsed file, and take all of its values.

    Raises:
        ValueError: If transformers cannot read it, or a value is set that cannot be converted.
    """
    kind = metadata.take("tokenizer.ggml.model", "none")
    if kind not in ("gpt2", "llama"):
        metadata.refuse("tokenizer.ggml.model", kind, "gpt2 or llama")
    rule = metadata.take("tokenizer.ggml.pre")
    if kind == "gpt2" and rule not in _RULES:
        metadata.refuse("tokenizer.ggml.pre", rule, ", ".join(_RULES))
    for name in (*(f"ggml.{name}" for name in _READ), *_WITHOUT_EFFECT):
        metadata.take(f"tokenizer.{name}")
    metadata.expect("tokenizer.ggml.remove_extra_whitespaces", False)
    tokenizer = _load(file, kind_of_config)
    _check_control_tokens(tokenizer, reader, metadata.name)
    if kind == "gpt2":
        metadata.take("tokenizer.ggml.add_space_prefix")  # llama.cpp reads it, and does not use it here
        if rule != "smollm" and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            metadata.refuse("tokenizer.ggml.pre", rule, "a rule that the installed transformers can read")
        _set_rule(tokenizer, rule)
    elif metadata.architecture == "gemma3":
        metadata.expect("tokenizer.ggml.add_space_prefix", False)
    else:
        _set_spaces(tokenizer, prefix=metadata.take("tokenizer.ggml.add_space_prefix", True))
    _set_ends(tokenizer, metadata, begins=kind == "llama" or rule in _LLAMA_3)
    return tokenizer


def _load(file: Path, kind_of_config: type[PreTrainedConfig]) -> PreTrainedTokenizerFast:
    try:
        # A folder, because transformers also reads a config.json beside the file.
        with TemporaryDirectory() as place:
            (Path(place) / file.name).symlink_to(file.resolve())
            return TOKENIZER_MAPPING.get(kind_of_config, PreTrainedTokenizerFast).from_pretrained(
                place, gguf_file=file.name
            )
    except Exception as error:  # any kind, for a vocabulary that it does not expect
        reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
        raise ValueError(
            f"transformers cannot read the tokenizer of '{file}': {reason} Use the model's folder of the Hugging Face"
            " hub instead."
        ) from error


def _check_control_tokens(tokenizer: PreTrainedTokenizerFast, reader: Any, name: str) -> None:
    """Raise a ``ValueError`` for a control token, such as BOS, that has another id than in the file, or none.

    transformers gives a new id to one with letters that a byte-level vocabulary does not spell.
    """
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    types = reader.fields.get("tokenizer.ggml.token_type")
    if types is None:
        return
    added = tokenizer.get_added_vocab()
    for index, part in enumerate(types.data):
        if types.parts[part][0] == _CONTROL:
            token = bytes(tokens.parts[tokens.data[index]]).decode("utf-8", errors="replace")
            if added.get(token) != index:
                raise ValueError(
                    f"'{name}' has the control token '{token}' (`tokenizer.ggml.token_type`), which transformers would"
                    " split. Use the model's folder of the Hugging Face hub instead."
                )


def _set_rule(tokenizer: PreTrainedTokenizerFast, rule: str) -> None:
    """Split text by a rule of llama.cpp as the original tokenizer does."""
    backend = tokenizer.backend_tokenizer
    if rule == "smollm":  # transformers does not merge the white space before a number (``"\n\n1"``)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif rule in _LLAMA_3:
        backend.model.ignore_merges = True
    elif rule == "qwen2":  # normalizes text to composed characters
        backend.normalizer = normalizers.NFC()


def _set_spaces(tokenizer: PreTrainedTokenizerFast, *, prefix: bool) -> None:
    """Put a space before a text or not.

    As in Llama 2's tokenizer.json, the space also precedes a text that begins with one, unlike in transformers.
    """
    normalizer: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    read = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizer])
        read.append(decoders.Strip(" ", 1, 0))
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizer
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(read)


def _set_ends(tokenizer: PreTrainedTokenizerFast, metadata: Metadata, *, begins: bool) -> None:
    """Add special tokens around a text as the file specifies; ``begins`` is whether llama.cpp adds BOS by default."""
    for name, default in (("bos", begins), ("eos", False)):
        added = metadata.take(f"tokenizer.ggml.add_{name}_token", default)
        if added and getattr(tokenizer, f"{name}_token_id") is None:
            metadata.refuse(f"tokenizer.ggml.add_{name}_token", added, f"false without `{name}_token_id`")
        if getattr(tokenizer, f"add_{name}_token") != added:
            setattr(tokenizer, f"add_{name}_token", added)
