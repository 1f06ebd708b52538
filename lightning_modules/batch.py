"""The contract between data and model: one batch of packed sequences."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is not scored."""

BoolArray = NDArray[np.bool_]

UNREADABLE = -1
"""Row of a `DocumentRef` that reports the rest of a file, which cannot be read."""

MAX_SEQUENCE_LENGTH = 2**27
"""Length in tokens that no sequence reaches: a thousand times what is trained on today."""


class DocumentRef(NamedTuple):
    """Where a document of a corpus comes from; its scores are filed under it."""

    key: str  # name of the document in the corpus; not necessarily unique
    file: str  # name of its file; file and row together are unique
    row: int  # index of its row or line in the file
    columns: dict[str, Any]  # other columns of the corpus that are stored with its scores, by name
    truncated: bool = False  # whether its end was cut off
    text_hash: str | None = None  # of the whole text; equal for documents with the same text
    first_words: str | None = None  # by which a reader recognizes the document
    error: str | None = None  # why it cannot be scored, or None


class PackedBatch(TypedDict):
    """Sequences of one or several documents; entry ``t`` of every per-token tensor is about token ``t``.

    Attributes:
        input_ids: ``[B, T]`` int64 token ids; sequences shorter than ``T`` are padded on the right with any valid id.
        labels: ``[B, T]`` int64, equal to ``input_ids`` where the token is scored and ``IGNORE_INDEX`` elsewhere:
            the first token of each document (it has no context), prompts that are not learned, and padding.
        position_ids: ``[B, T]`` int64 positions, which restart at 0 in each document.
        document_boundaries: For each sequence the ascending token indices ``[0, end of document 1, end of document 2,
            ..]``. Contexts never cross a boundary; tokens after the last one are padding. These are plain integers,
            because they decide the shapes of the computation and must be known without waiting for the accelerator.
        text: For each sequence the text of its only document (evaluation only).
        offsets: ``[B, T, 2]`` int64 character span ``[start, end)`` of each token in ``text`` (evaluation only).
        names: For each sequence the name of its only document in messages and result files (evaluation only).
        sets: For each sequence the name of its validation set, empty without named sets (evaluation only).
        influence: ``[B, T]`` float32 token weights that were computed in advance (training with stored weights only).
        document_refs: For each sequence the source of its only document, and nothing for a dummy sequence that keeps
            processes in lockstep (documents of a corpus only).
        failed: Documents of the corpus that could not be read or tokenized, and files with the row `UNREADABLE`.
        scored: ``[B, T]`` bool, whether ``labels`` are scored. A batch gets it when it is moved to an accelerator,
            because a forward pass would have to wait for the labels otherwise; an array, because Lightning, DDP and
            FSDP2 would move a tensor as well. Remove it if you change ``labels`` on an accelerator.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_boundaries: list[list[int]]
    text: NotRequired[list[str]]
    offsets: NotRequired[Tensor]
    names: NotRequired[list[str]]
    sets: NotRequired[list[str]]
    influence: NotRequired[Tensor]
    document_refs: NotRequired[list[DocumentRef]]
    failed: NotRequired[list[DocumentRef]]
    scored: NotRequired[BoolArray]


def pack_sequence(documents: Sequence[Tensor]) -> PackedBatch:
    """Pack the ``[n]`` int64 token ids of documents into one sequence; all but their first tokens are scored."""
    tokens = torch.cat(list(documents)).unsqueeze(0)
    boundaries = [0, *accumulate(map(len, documents))]
    labels = tokens.clone()
    labels[:, boundaries[:-1]] = IGNORE_INDEX
    positions = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0).to(tokens.device)
    return PackedBatch(input_ids=tokens, labels=labels, position_ids=positions, document_boundaries=[boundaries])


def unscored_token(device: torch.device) -> PackedBatch:
    """Return a batch of one token that is not scored, for the cheapest possible forward pass."""
    return pack_sequence([torch.zeros(1, dtype=torch.int64, device=device)])


def batch_to(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch with the tensors that a model reads moved to ``device``; text and offsets stay."""
    moved = with_scored(batch, device)
    for name in ("input_ids", "labels", "position_ids", "influence"):
        if name in batch:
            moved[name] = send(batch[name], device)
    return moved


def with_scored(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return a copy of a batch that is about to be moved to ``device``, with ``scored`` if it is an accelerator."""
    batch = batch.copy()
    if batch["labels"].device.type == "cpu" and device.type != "cpu":
        batch["scored"] = batch["labels"].ne(IGNORE_INDEX).numpy()
    return batch


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; if it comes from main memory, nothing waits for the device."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type == "cuda")
