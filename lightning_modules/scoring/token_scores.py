"""Long and short log-likelihoods of the tokens of one document, and their file format."""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import merge_spans, soft_influence
from lightning_modules.functional.checks import find_impossible
from lightning_modules.functional.windows import ShortContext
from lightning_modules.utilities.files import write_atomically

FORMAT = "longce-token-scores-3"

_SPAN = re.compile(r"\[\s*(\d+)\s*,\s*(\d+)\s*\]")

FIRST_WORDS = 80  # characters of a text, stored with its scores


@dataclass  # not frozen: Lightning walks through predictions and refuses frozen ones
class TokenScores:
    """Long and short log-likelihoods of the tokens of one document, independent of thresholds.

    Attributes:
        text_sha256: Hash of the document's UTF-8 text.
        evaluator: Identity of the model that scored it (`lightning_modules.models.loading.identity`).
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that shared one window.
        token_ids: ``[N]`` int64 tokens of the document from the evaluator's tokenizer.
        offsets: ``[N, 2]`` int64 character span of each token.
        long: ``[N]`` float32 log-likelihoods given everything before the token, in nats.
        short: ``[N]`` float32 log-likelihoods given the short context, equal to ``long`` for a token without one.
        floor: The short log-likelihood is NaN for tokens whose long one is this or less, in nats. Key tokens for a
            ``beta`` of this or above do not need them.
        context_scores: ``[w]`` float32 log-likelihoods of the last w tokens by context length (`ContextLengths`);
            not stored.
        settings: Everything else that the evaluator's scores depend on: tokenizer, dtype, attention, special tokens.
        unscored: Number of tokens at the start that are not scored: the first, and special tokens before the text.
    """

    text_sha256: str
    evaluator: str
    context_length: int
    stride: int
    token_ids: Tensor
    offsets: Tensor
    long: Tensor
    short: Tensor
    floor: float = -math.inf
    context_scores: dict[int, Tensor] = field(default_factory=dict)
    settings: str = ""
    unscored: int = 1

    @property
    def short_context(self) -> ShortContext:
        """K and d; no field, because Lightning walks through the fields of predictions and refuses frozen ones."""
        return ShortContext(self.context_length, self.stride)

    def soft_influence(self, *, gamma: float = 5.0) -> Tensor:
        """Return the ``[N]`` soft influence of the tokens."""
        if self.floor > -math.inf:
            raise ValueError(f"Soft influence needs scores of all tokens, got those above {self.floor} nats only.")
        return soft_influence(self.long, self.short, gamma=gamma)

    def impossible(self) -> Tensor:
        """Return the ``[N]`` mask of tokens with a log-likelihood that is NaN, infinite or above 0."""
        # By design, tokens at the floor have no short log-likelihood.
        has_short = ~(self.long <= self.floor)
        # NaN compares as false, so a NaN in `long` is wrong whatever the floor.
        wrong = find_impossible(self.long) | (find_impossible(self.short) & has_short)
        for values in self.context_scores.values():
            wrong[len(wrong) - len(values) :] |= find_impossible(values)  # of the last w tokens
        return wrong

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: readers see all of it or nothing, even after a crash.

        Raises:
            ValueError: If a log-likelihood is NaN, infinite or above 0.
        """
        self._check(path)
        tensors = {"token_ids": self.token_ids, "offsets": self.offsets, "long": self.long, "short": self.short}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = {
            "format": FORMAT,
            "text_sha256": self.text_sha256,
            "evaluator": self.evaluator,
            "context_length": str(self.context_length),
            "stride": str(self.stride),
            "settings": self.settings,
        }
        if self.floor > -math.inf:  # absent from files of complete scores, whose checksums it would change
            header["floor"] = repr(self.floor)
        if self.unscored != 1:
            header["unscored"] = str(self.unscored)
        header["checksum"] = _compute_checksum(header, tensors)  # safetensors files lack one
        write_atomically(Path(path), save(tensors, metadata=header))

    def _check(self, path: str | os.PathLike[str]) -> None:
        count = int(self.impossible().sum())
        if count:
            raise ValueError(f"'{path}': {count} of {len(self.long)} tokens have impossible log-likelihoods.")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenScores":
        """Read a file and verify its checksum.

        Raises:
            ValueError: If the file is truncated or changed, or does not contain possible token scores.
            FileNotFoundError: If it does not exist.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        except SafetensorError:
            header = {}
            tensors = {}
        if header.get("format") != FORMAT or header.pop("checksum", None) != _compute_checksum(header, tensors):
            raise ValueError(f"'{path}' is damaged, or does not contain token scores in the format {FORMAT}.")
        scores = cls(
            text_sha256=header["text_sha256"],
            evaluator=header["evaluator"],
            context_length=int(header["context_length"]),
            stride=int(header["stride"]),
            floor=float(header.get("floor", -math.inf)),
            settings=header.get("settings", ""),
            unscored=int(header.get("unscored", 1)),
            **tensors,
        )
        scores._check(path)  # the checksum does not show that a program wrote possible values
        return scores


def scores_of_row(batch: PackedBatch, row: int, long: Tensor, short: Tensor, **fields: Any) -> TokenScores:
    """Return the scores of a sequence with one document, from ``[T]`` log-likelihoods and the other ``fields``."""
    tokens = batch["document_boundaries"][row][-1]
    scored = batch.get("scored")
    if scored is None:
        scored = batch["labels"].ne(IGNORE_INDEX).cpu().numpy()
    positions = scored[row, :tokens].nonzero()[0]
    return TokenScores(
        text_sha256=text_sha256(batch["text"][row]),
        token_ids=batch["input_ids"][row, :tokens].cpu(),
        offsets=batch["offsets"][row, :tokens].cpu(),
        long=long[:tokens].float().cpu(),
        short=short[:tokens].float().cpu(),
        unscored=int(positions[0]) if len(positions) else tokens,
        **fields,
    )


def text_sha256(text: str) -> str:
    """Return the hash that identifies a document in caches and result files."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def shorten_text(text: str) -> str:
    """Return the beginning of a text on one line, with at most `FIRST_WORDS` characters."""
    line = " ".join(text[: 4 * FIRST_WORDS].split())
    return line if len(line) <= FIRST_WORDS else f"{line[: FIRST_WORDS - 1]}…"


def read_key_spans(path: str | os.PathLike[str], *, merge: bool = True) -> Tensor:
    """Read ``[M, 2]`` int64 key spans in the text format of the paper's authors: ``[start, end];[start, end];..``.

    Spans that touch or overlap are merged if ``merge`` is set. The file is parsed, never evaluated.
    """
    text = Path(path).read_text(encoding="utf-8").strip()
    spans = []
    for number, entry in enumerate(text.split(";") if text else []):
        match = _SPAN.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"'{path}', span {number}: expected '[start, end]', got '{entry.strip()[:40]}'.")
        spans.append([int(match[1]), int(match[2])])
    unmerged = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
    try:
        merged = merge_spans(unmerged)  # also checks the order
        return merged if merge else unmerged
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from error


def _compute_checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{list(tensors[name].shape)}{tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())  # little-endian on every supported machine
    return digest.hexdigest()
