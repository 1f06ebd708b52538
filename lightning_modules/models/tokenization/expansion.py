"""Limit on how much a stored tokenizer expands a text: a short file could turn one letter into a billion."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.utils import cached_file

from lightning_modules.models.tokenization.encoding import panics_caught

MAX_GROWTH = 100
"""Maximum number of characters that a normalizer or decoder may make of one. Unicode's own rules produce up to 18."""

MAX_STEPS = 2000
"""Steps of a normalizer or decoder, at most. Common ones have fewer than ten."""

_SAMPLE = (*map(chr, range(32, 127)), *"\t\n éßﬁ①ａ北가ក😀ﷺ", "e\u0301")
"""Characters of many kinds, which a regular expression or a table could replace."""

_DECODERS = frozenset({"ByteFallback", "Fuse", "Metaspace", "WordPiece", "CTC", "BPEDecoder"})
"""Steps that only decoders have; they make at most a few characters of one, and are not repeated to an effect."""


def check_expansion(path_or_id: str, revision: str | None = None) -> None:
    """Raise a ``ValueError`` if the normalizer or the decoder of a stored tokenizer expands text without bound.

    It has to be checked before the tokenizer is loaded, which normalizes the tokens in its own file.
    """
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        file = cached_file(path_or_id, "tokenizer.json", **options)
        content = {} if file is None else json.loads(Path(file).read_bytes())
        parts = [list(_steps(content.get(name))) for name in ("normalizer", "decoder")]
    except Exception:  # any kind, which is reported where the tokenizer is loaded
        return
    for steps in parts:
        if expands(steps):
            raise ValueError(
                f"The tokenizer.json of '{path_or_id}' has {len(steps)} replacements that together make more than"
                f" {MAX_GROWTH} characters of one, which would fill the memory: use the original tokenizer."
            )


def expands(steps: list[Mapping[str, Any]]) -> bool:
    """Return whether steps of a normalizer or decoder, one after another, make too much of any character."""
    steps = [step for step in steps if step.get("type") not in _DECODERS]
    if len(steps) > MAX_STEPS or any(len(text) > MAX_GROWTH for step in steps for text in _written(step)):
        return True
    # The next step can replace the output of a step, so each output is tried, and each of its characters.
    texts: set[str] = set()
    for step in steps:
        texts.update(_written(step), _replaced(step))
    functions = _functions(steps)
    for first in sorted(texts.union(*texts, _SAMPLE)):  # a text is also a set of its characters
        text = first
        for normalize in functions:
            text = normalize(text)
            if len(text) > MAX_GROWTH * max(len(first), 1):
                return True
    return False


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or decoder, including those in nested sequences."""
    if not isinstance(part, Mapping):
        return
    inner = part.get("normalizers", part.get("decoders"))
    if inner is None:
        yield part
    for each in inner or ():
        yield from _steps(each)


def _replaced(step: Mapping[str, Any]) -> list[str]:
    return [text for text in step.get("pattern", {}).values() if isinstance(text, str)]


def _written(step: Mapping[str, Any]) -> list[str]:
    texts = [step.get("content"), step.get("prepend")]
    return [text for text in texts if isinstance(text, str)]


def _functions(steps: list[Mapping[str, Any]]) -> list[Callable[[str], str]]:
    """Return the functions of the steps; one that cannot be made is reported where the tokenizer is loaded."""
    empty = json.loads(Tokenizer(BPE()).to_str())
    functions = []
    for step in steps:
        try:
            with panics_caught():
                # Only a complete tokenizer can be read from JSON.
                normalizer = Tokenizer.from_str(json.dumps(empty | {"normalizer": dict(step)})).normalizer
        except Exception:  # `tokenizers` raises a bare Exception, even for a step that only decoders have
            continue
        functions.append(normalizer.normalize_str)
    return functions
