"""The contract between the data and the model: one batch of packed rows."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is not scored."""

MAX_SEQUENCE_LENGTH = 2**27
"""Tokens of a row, at most: a thousand times what is trained on today, and few enough to be planned and packed."""


class DocumentRef(NamedTuple):
    """Where a document of a corpus comes from, by which its scores are filed."""

    key: str  # name of the document in the corpus; not necessarily unique
    file: str  # name of its file. File and row together are unique
    row: int  # number of its row or line in the file, from 0 on
    columns: dict[str, Any]  # what else of the corpus goes with its scores, by name
    truncated: bool = False  # whether tokens were cut off at its end
    error: str | None = None  # why it cannot be scored, if it cannot


class PackedBatch(TypedDict):
    """Rows of one or several documents each; entry ``t`` of every per-token tensor speaks of token ``t``.

    Attributes:
        input_ids: ``[B, T]`` int64 token ids; rows shorter than ``T`` are padded on the right with any valid id.
        labels: ``[B, T]`` int64, equal to ``input_ids`` where the token is scored and ``IGNORE_INDEX`` elsewhere:
            the first token of each document (it has no context), prompts that are not learned, and padding.
        position_ids: ``[B, T]`` int64 positions that restart at 0 with each document.
        document_boundaries: For each row the ascending token indices ``[0, end of document 1, end of document 2, ..]``.
            Contexts never cross a boundary; tokens after the last one are padding. Plain integers, because they
            decide the shape of the work and must be known without asking the accelerator.
        text: For each row the text of its one document (evaluation only).
        offsets: ``[B, T, 2]`` int64 character span ``[start, end)`` of each token in ``text`` (evaluation only).
        names: For each row the name of its one document, as messages and result files cite it (evaluation only).
        influence: ``[B, T]`` float32 token weights that were computed beforehand (training with stored weights only).
        document_refs: For each row where its one document comes from; none of a row that only keeps processes in step
            (documents of a corpus only).
        failed: Documents of the corpus that should be in this batch, and are not for an error.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_boundaries: list[list[int]]
    text: NotRequired[list[str]]
    offsets: NotRequired[Tensor]
    names: NotRequired[list[str]]
    influence: NotRequired[Tensor]
    document_refs: NotRequired[list[DocumentRef]]
    failed: NotRequired[list[DocumentRef]]


def packed_row(documents: Sequence[Tensor]) -> PackedBatch:
    """Pack ``[n]`` int64 token ids of documents into one row, in which all but their first tokens are scored."""
    tokens = torch.cat(list(documents)).unsqueeze(0)
    boundaries = [0, *accumulate(map(len, documents))]
    labels = tokens.clone()
    labels[:, boundaries[:-1]] = IGNORE_INDEX
    positions = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0).to(tokens.device)
    return PackedBatch(input_ids=tokens, labels=labels, position_ids=positions, document_boundaries=[boundaries])


def unscored_token(device: torch.device) -> PackedBatch:
    """Return a sequence of one token that is not scored: the cheapest pass through a model."""
    return packed_row([torch.zeros(1, dtype=torch.int64, device=device)])


def batch_to(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with what a model reads on `device`; text and offsets stay where they are."""
    moved = batch.copy()
    moved["input_ids"] = batch["input_ids"].to(device, non_blocking=True)
    moved["labels"] = batch["labels"].to(device, non_blocking=True)
    moved["position_ids"] = batch["position_ids"].to(device, non_blocking=True)
    if "influence" in batch:
        moved["influence"] = batch["influence"].to(device, non_blocking=True)
    return moved
