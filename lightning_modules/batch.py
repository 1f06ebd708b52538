"""The contract between data and model: one batch of packed sequences."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORE_INDEX = -100
"""Label of a token that is not scored."""

BoolArray = NDArray[np.bool_]

MAX_SEQUENCE_LENGTH = 2**27
"""Upper bound of sequence lengths in tokens: a thousand times the lengths that models are trained on today."""


class PackedBatch(TypedDict):
    """Sequences of one or several documents; entry ``t`` of every per-token tensor is about token ``t``.

    Attributes:
        input_ids: ``[B, T]`` int64 token ids; sequences shorter than ``T`` are padded on the right with any valid id.
        labels: ``[B, T]`` int64, equal to ``input_ids`` where the token is scored and ``IGNORE_INDEX`` elsewhere:
            the first token of each document (it has no context), prompts that are not learned, and padding.
        position_ids: ``[B, T]`` int64 positions, which restart at 0 in each document and ascend. Those of training
            sequences may skip (`data.pose`), so they are not indices of tokens.
        document_boundaries: For each sequence the ascending token indices ``[0, end of document 1, end of document 2,
            ..]``. Contexts never cross a boundary; tokens after the last one are padding. These are plain integers,
            because they decide the shapes of the computation and must be known without waiting for the accelerator.
        text: For each sequence the text of its only document (evaluation only).
        offsets: ``[B, T, 2]`` int64 character span ``[start, end)`` of each token in ``text`` (evaluation only).
        names: For each sequence the name of its only document in messages and result files (evaluation only).
        sets: For each sequence the name of its validation set, empty without named sets (evaluation only).
        special_tokens: For each sequence whether the tokenizer was to add special tokens to its text (evaluation only).
        influence: ``[B, T]`` float32 token weights that were computed in advance (training with stored weights only).
        scored: ``[B, T]`` bool, whether ``labels`` are scored. Like the boundaries, it decides shapes and stays in main
            memory: an array, because Lightning, DDP and FSDP2 would move a tensor. `with_scored` computes it, also
            after ``labels`` have changed.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_boundaries: list[list[int]]
    scored: BoolArray
    text: NotRequired[list[str]]
    offsets: NotRequired[Tensor]
    names: NotRequired[list[str]]
    sets: NotRequired[list[str]]
    special_tokens: NotRequired[list[bool]]
    influence: NotRequired[Tensor]


def pack_sequence(documents: Sequence[Tensor]) -> PackedBatch:
    """Pack the ``[n]`` int64 token ids of documents into one sequence; all but their first tokens are scored."""
    tokens = torch.cat(list(documents)).unsqueeze(0)
    boundaries = [0, *accumulate(map(len, documents))]
    labels = tokens.clone()
    labels[:, boundaries[:-1]] = IGNORE_INDEX
    # Not from the labels, which may be on an accelerator.
    scored = np.ones(tokens.shape, dtype=bool)
    scored[:, boundaries[:-1]] = False
    positions = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0).to(tokens.device)
    return PackedBatch(
        input_ids=tokens,
        labels=labels,
        position_ids=positions,
        document_boundaries=[boundaries],
        scored=scored,
    )


def stack_sequences(sequences: Sequence[PackedBatch]) -> PackedBatch:
    """Stack ``[1, n]`` batches of one sequence each in main memory; shorter ones are padded on the right."""
    labels = [sequence["labels"][0] for sequence in sequences]
    padded_labels = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    return PackedBatch(
        input_ids=pad_sequence([sequence["input_ids"][0] for sequence in sequences], batch_first=True),
        labels=padded_labels,
        position_ids=pad_sequence([sequence["position_ids"][0] for sequence in sequences], batch_first=True),
        document_boundaries=[sequence["document_boundaries"][0] for sequence in sequences],
        scored=padded_labels.ne(IGNORE_INDEX).numpy(),
    )


def stack_documents(documents: Sequence[PackedBatch]) -> PackedBatch:
    """Stack ``[1, n]`` batches of one document each; shorter ones are padded on the right."""
    batch = stack_sequences(documents)
    batch["text"] = [document["text"][0] for document in documents]
    batch["offsets"] = pad_sequence([document["offsets"][0] for document in documents], batch_first=True)
    batch["names"] = [document["names"][0] for document in documents]
    return batch


def batch_of_inputs(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> PackedBatch:
    """Make a batch in main memory of the ``[B, T]`` inputs of a Hugging Face model, which may be on any device.

    Labels are not shifted, and the first token of each document is not scored.

    Args:
        input_ids: Token ids.
        labels: The token id, or ``IGNORE_INDEX`` where a token is not scored.
        attention_mask: 0 for padding, on either side. No padding by default.
        position_ids: They start at 0, and a document begins where they restart; each sequence is one document by
            default.

    Raises:
        ValueError: If a shape is wrong, labels are shifted, positions skip or start above 0, or a sequence has no
            tokens.
    """
    input_ids = input_ids.cpu()
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.cpu()
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[-1]).expand(input_ids.shape)
    elif position_ids.shape[:-1] == (1,):  # those of all sequences
        position_ids = position_ids.expand(len(input_ids), -1)
    inputs = {"input_ids": input_ids, "labels": labels.cpu()}
    inputs |= {"attention_mask": attention_mask, "position_ids": position_ids.cpu()}
    shapes = {name: list(values.shape) for name, values in inputs.items()}
    if input_ids.ndim != 2 or any(shape != shapes["input_ids"] for shape in shapes.values()):
        raise ValueError(f"The inputs must be [B, T], got {shapes}.")
    return stack_sequences([_packed_row(*row) for row in zip(*inputs.values(), strict=True)])


def _packed_row(tokens: Tensor, labels: Tensor, attention_mask: Tensor, positions: Tensor) -> PackedBatch:
    """Return the ``[1, n]`` batch of a sequence without its padding."""
    kept = attention_mask.bool()
    tokens = tokens[kept]
    labels = labels[kept]
    if len(tokens) == 0:
        raise ValueError("A sequence has no tokens, only padding (`attention_mask` is 0): leave it out.")
    unscored = labels.eq(IGNORE_INDEX)
    if (labels.ne(tokens) & ~unscored).any():
        raise ValueError(
            f"`labels` must be the `input_ids` or {IGNORE_INDEX} at the same position, as in Hugging Face models: do"
            " not shift them."
        )
    padding = int(kept.nonzero()[0])
    packed = pack_sequence(tokens.tensor_split(find_restarts(positions[kept], padding=padding)))
    packed["labels"][0, unscored] = IGNORE_INDEX
    packed["scored"][0, unscored.numpy()] = False
    return packed


def find_restarts(positions: Tensor, *, padding: int = 0) -> Tensor:
    """Return the indices at which ``[n]`` positions restart.

    Args:
        positions: Positions of the tokens of a sequence, without its padding.
        padding: Number of tokens of padding on the left, which the positions may count.

    Raises:
        ValueError: If positions skip, or start above 0.
    """
    first = int(positions[0])
    # Short contexts are always numbered from 0. With learned positions or EABF, a long context with other positions
    # would differ from them in more than its length.
    if first not in (0, padding):
        raise ValueError(
            f"`position_ids` must start at 0 in each document, got {first} at the first token: a sequence is scored"
            " without the tokens before it, even if it is a chunk of a longer document. Subtract the first position."
        )
    starts = positions.diff().ne(1).nonzero().squeeze(-1) + 1
    if positions[starts].any():
        raise ValueError(
            f"`position_ids` must increase by 1, or restart at 0 where the next document begins, got"
            f" {int(positions[starts].max())} after another position: skipped positions are supported only in `longce"
            " fit`, by `data.pose`."
        )
    return starts


def token_indices(batch: PackedBatch) -> Tensor:
    """Return the ``[B, T]`` int64 index of each token in its document, on the device of the batch; 0 in padding."""
    indices = torch.zeros(batch["input_ids"].shape, dtype=torch.int64)
    for row, boundaries in enumerate(batch["document_boundaries"]):
        for start, stop in pairwise(boundaries):
            indices[row, start:stop] = torch.arange(stop - start)
    return send(indices, batch["input_ids"].device)


def unscored_token(device: torch.device) -> PackedBatch:
    """Return a batch of one token that is not scored, for the cheapest possible forward pass."""
    return pack_sequence([torch.zeros(1, dtype=torch.int64, device=device)])


def batch_to(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch with the tensors that a model reads moved to ``device``; text and offsets stay."""
    moved = batch.copy()
    for name in ("input_ids", "labels", "position_ids", "influence"):
        if name in batch:
            moved[name] = send(batch[name], device)
    return moved


def with_scored(batch: PackedBatch) -> PackedBatch:
    """Return a copy of a batch with ``scored`` of its labels.

    Batches that were made or changed elsewhere enter here.

    Raises:
        ValueError: If document boundaries do not ascend within the sequence.
    """
    for boundaries in batch["document_boundaries"]:
        check_boundaries(boundaries, batch["labels"].shape[1])
    batch = batch.copy()
    batch["scored"] = batch["labels"].ne(IGNORE_INDEX).cpu().numpy()
    return batch


def ensure_scored(batch: PackedBatch) -> PackedBatch:
    """Return a batch with ``scored``, which batches of other libraries may lack."""
    return batch if "scored" in batch else with_scored(batch)


def check_boundaries(boundaries: Sequence[int], length: int | None = None) -> None:
    """Raise a ``ValueError`` unless the boundaries of a sequence ascend, and end within its ``length`` if given."""
    ascends = all(start <= stop for start, stop in pairwise(boundaries))
    if not ascends or (length is not None and (boundaries[0] != 0 or boundaries[-1] > length)):
        where = "" if length is None else f" from 0 to at most the {length} tokens of the sequence"
        raise ValueError(f"`document_boundaries` must ascend{where}, got {list(boundaries)!r:.200}.")


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; a copy from main memory does not wait for the device."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type == "cuda")
