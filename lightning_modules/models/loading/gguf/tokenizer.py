"""Tokenizers of GGUF files, which transformers reads in part."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_modules.models.loading.gguf.metadata import Metadata

_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Tokenizers of llama.cpp (``tokenizer.ggml.pre``) that split numbers into digits, then by the rule of GPT-2.

transformers does not know this, and then does not merge the white space before a number (``"\\n\\n1"``).
"""

_AS_GPT2 = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "trillion"})
"""Tokenizers with GPT-2's rule, which transformers uses for all that it does not know."""

_LLAMA_3 = frozenset({"llama3", "llama-v3", "llama-bpe"})
"""Names of the rule of Llama 3, whose tokenizer takes a word of the vocabulary whole, and begins a text with BOS."""

_QWEN_2 = "qwen2"
"""Name of the rule of Qwen 2 and 3, whose tokenizer normalizes text to composed characters (NFC)."""

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

log = logging.getLogger(__name__)


def read_tokenizer(file: Path, reader: Any, metadata: Metadata) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file, and take all of its values.

    Args:
        file: The file.
        reader: The parsed file.
        metadata: Its values.

    Raises:
        ValueError: If transformers cannot read it, or a value is set that cannot be converted.
    """
    kind = metadata.take("tokenizer.ggml.model", "none", whole=True)
    if kind not in ("gpt2", "llama"):
        metadata.refuse("tokenizer.ggml.model", kind, "gpt2 or llama", whole=True)
    rule = metadata.take("tokenizer.ggml.pre", "default", whole=True)
    for name in _READ:
        metadata.take(f"tokenizer.ggml.{name}", whole=True)
    for name in _WITHOUT_EFFECT:
        metadata.take(f"tokenizer.{name}", whole=True)
    metadata.expect("tokenizer.ggml.remove_extra_whitespaces", False, whole=True)
    tokenizer = _load(file, reader)
    if kind == "gpt2":
        metadata.take("tokenizer.ggml.add_space_prefix", whole=True)  # llama.cpp reads it, and does not use it here
        _set_rule(tokenizer, rule, metadata.name)
    else:
        _set_spaces(tokenizer, metadata)
    _check_control_tokens(tokenizer, reader, metadata.name)
    _set_ends(tokenizer, metadata, begins=kind == "llama" or rule in _LLAMA_3)
    return tokenizer


def _check_control_tokens(tokenizer: PreTrainedTokenizerFast, reader: Any, name: str) -> None:
    """Raise a ``ValueError`` for a control token, such as BOS, that has another id than in the file, or none.

    transformers gives a new id to one with letters that a byte-level vocabulary does not spell.
    """
    tokens, types = (reader.fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
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


def _set_spaces(tokenizer: PreTrainedTokenizerFast, metadata: Metadata) -> None:
    """Put a space before a text or not, as the file says; by default, only the tokenizer of Gemma does not."""
    default = metadata.architecture != "gemma3"
    prefix = metadata.take("tokenizer.ggml.add_space_prefix", default, whole=True)
    if prefix and not default:
        metadata.refuse("tokenizer.ggml.add_space_prefix", prefix, "false", whole=True)
    if not default:
        return
    # As in Llama 2's tokenizer.json: the space also precedes a text that begins with one, unlike in transformers.
    spaces = normalizers.Replace(" ", "▁")
    read = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)] if prefix else read)


def _set_ends(tokenizer: PreTrainedTokenizerFast, metadata: Metadata, *, begins: bool) -> None:
    """Add special tokens around a text as the file says; ``begins`` is whether llama.cpp adds BOS by default."""
    for name, default in (("bos", begins), ("eos", False)):
        added = metadata.take(f"tokenizer.ggml.add_{name}_token", default, whole=True)
        if added and getattr(tokenizer, f"{name}_token_id") is None:
            metadata.refuse(f"tokenizer.ggml.add_{name}_token", added, f"false without `{name}_token_id`", whole=True)
        if getattr(tokenizer, f"add_{name}_token") != added:
            setattr(tokenizer, f"add_{name}_token", added)


def _load(file: Path, reader: Any) -> PreTrainedTokenizerFast:
    try:
        # A folder, because transformers also reads a config.json beside the file.
        with TemporaryDirectory() as place, _parsed_once(file, reader):
            (Path(place) / file.name).symlink_to(file.resolve())
            return AutoTokenizer.from_pretrained(place, gguf_file=file.name)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # any kind, for a vocabulary that it does not expect
        reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
        raise ValueError(
            f"transformers cannot read the tokenizer of '{file}': {reason} Use the model's folder of the Hugging Face"
            " hub instead."
        ) from error


def _set_rule(tokenizer: PreTrainedTokenizerFast, rule: str, name: str) -> None:
    """Split text by a rule of llama.cpp as the original tokenizer does; warn of one that nobody has compared."""
    backend = tokenizer.backend_tokenizer
    is_known = not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if rule in _DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif rule in _LLAMA_3 and is_known:
        backend.model.ignore_merges = True
    elif rule == _QWEN_2 and is_known:
        backend.normalizer = normalizers.NFC()
    elif rule not in _AS_GPT2:
        log.warning(
            "'%s' splits text by the rule '%s', which has not been compared with the original tokenizer: its tokens may"
            " differ from those that the model was trained on. Name the original tokenizer (`--model_tokenizer`,"
            " `--evaluator_tokenizer`).",
            name,
            rule,
        )


@contextmanager
def _parsed_once(file: Path, reader: Any) -> Iterator[None]:
    """Let transformers use the reader of a file, which it would parse three times, each in 20 s for Gemma."""
    import gguf

    original = gguf.GGUFReader

    def read(path: Any, *arguments: Any, **options: Any) -> Any:
        return reader if Path(path).resolve() == file.resolve() else original(path, *arguments, **options)

    gguf.GGUFReader = read
    try:
        yield
    finally:
        gguf.GGUFReader = original
