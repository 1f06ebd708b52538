"""Build training sequences of packed tokens, and batches of sequences."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from datamodules.influence.store import InfluenceStore
from datamodules.packing.packing import PackedRows
from datamodules.packing.positions import PoSE
from datamodules.token_store.store import TokenStore
from lightning_modules.batch import IGNORE_INDEX, PackedBatch, find_restarts


class Row(TypedDict):
    """One sequence of a :class:`PackedBatch`: the same keys without the batch dimension."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_boundaries: list[int]
    text: NotRequired[str]
    offsets: NotRequired[Tensor]
    name: NotRequired[str]
    set: NotRequired[str]
    special_tokens: NotRequired[bool]
    influence: NotRequired[Tensor]


@dataclass(eq=False)
class PackedRowDataset(Dataset[Row]):
    """Training sequences, read from the token store on access.

    All sequences have ``rows.sequence_length`` tokens, with padding after the last boundary: every step takes the same
    memory, and no process waits for another with longer sequences. With ``pose``, the positions of a sequence depend on
    its index and on ``pose_seed``, and are the same in each epoch.
    """

    store: TokenStore
    rows: PackedRows
    isolate_documents: bool = True
    loss_on_prompt: bool = True
    influence: InfluenceStore | None = None
    pose: PoSE | None = None
    pose_seed: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        segments = self.rows.row(index)
        tokens = np.concatenate([self.store.tokens[start:stop] for start, stop in segments.tolist()], dtype=np.int64)
        ends = np.cumsum(segments[:, 1] - segments[:, 0])
        if not self.isolate_documents:
            ends = ends[-1:]
        row = make_row(tokens, ends)
        if self.pose is not None:
            row["position_ids"] = torch.from_numpy(self.pose.positions(ends, [*self.pose_seed, index]))
        if not self.loss_on_prompt:
            is_prompt = np.concatenate([self.prompt_mask(start, stop) for start, stop in segments.tolist()])
            row["labels"][torch.from_numpy(is_prompt)] = IGNORE_INDEX
        if self.influence is not None:
            weights = np.concatenate([self.influence.values[start:stop] for start, stop in segments])
            row["influence"] = torch.from_numpy(weights.astype(np.float32))
        return padded_row(row, self.rows.sequence_length)

    def identity(self) -> dict[str, Any]:
        """Return everything the sequences depend on: equal identities mean equal tokens in equal contexts."""
        packing = hashlib.sha256()
        for part in (self.rows.segments, self.rows.row_boundaries):
            packing.update(np.ascontiguousarray(part, dtype="<i8").reshape(-1).data)
        return {
            "token_store": self.store.folder.name,  # a hash of the text and the tokenizer
            "sequence_length": int(self.rows.sequence_length),
            "isolate_documents": self.isolate_documents,
            "packing": packing.hexdigest(),
        }

    def checksum(self) -> int:
        """Compute a CRC-32 that depends only on the content of the sequences."""
        checksum = zlib.crc32(json.dumps(self.store.manifest["crc32"], sort_keys=True).encode())
        for part in (self.rows.segments, self.rows.row_boundaries):
            checksum = zlib.crc32(np.ascontiguousarray(part, dtype="<i8").reshape(-1).data, checksum)
        if self.pose is not None:
            settings = [int(self.pose.target_length), int(self.pose.chunks), *self.pose_seed]
            checksum = zlib.crc32(json.dumps(settings).encode(), checksum)
        return checksum

    def prompt_mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens of a segment of the token stream belong to a prompt."""
        is_prompt = np.zeros(stop - start, dtype=bool)
        spans = self.store.prompt_spans
        if spans is None:
            return is_prompt
        first = np.searchsorted(spans[:, 1], start, side="right")  # the first span that ends after the start
        last = np.searchsorted(spans[:, 0], stop)  # spans from here on begin after the segment
        for begin, end in np.clip(spans[first:last] - start, 0, stop - start).tolist():
            is_prompt[begin:end] = True
        return is_prompt

    def count_prompt_tokens(self, segments: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each of ``[k, 2]`` segments of the token stream belong to a prompt."""
        spans = self.store.prompt_spans
        if spans is None:
            return np.zeros(len(segments), dtype=np.int64)
        # 1. Count the tokens of all spans that begin before each start and stop.
        totals = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
        begun = np.searchsorted(spans[:, 0], segments)
        before = totals[begun]
        # 2. Subtract those of the last of these spans that are not before it.
        ends = np.concatenate([[0], spans[:, 1]])[begun]
        before -= np.clip(ends - segments, 0, None)
        return before[:, 1] - before[:, 0]


def check_prompts(store: TokenStore) -> None:
    """Raise a ``ValueError`` unless some tokens of a store belong to prompts, and some do not."""
    if store.prompt_spans is None:
        raise ValueError("`loss_on_prompt: false` needs prompts, but no training document has one: remove it.")
    if int((store.prompt_spans[:, 1] - store.prompt_spans[:, 0]).sum()) == len(store.tokens):
        raise ValueError(
            "`loss_on_prompt: false` leaves nothing to train on: no training document has a response, or a turn that"
            " the chat template marks as the assistant's. Use other documents, or set `loss_on_prompt` to true."
        )


def make_row(tokens: NDArray[np.int64], document_ends: NDArray[np.int64]) -> Row:
    """Make a sequence whose documents end at the given token indices; the last one is the length of the sequence."""
    starts = np.concatenate([[0], document_ends[:-1]])
    input_ids = torch.from_numpy(tokens)
    labels = input_ids.clone()
    labels[torch.from_numpy(starts)] = IGNORE_INDEX
    positions = np.arange(len(tokens)) - np.repeat(starts, document_ends - starts)
    return Row(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.from_numpy(positions),
        document_boundaries=[0, *document_ends.tolist()],
    )


def padded_row(row: Row, length: int) -> Row:
    """Pad a training sequence on the right, after its last boundary, with tokens that are not scored."""
    missing = length - len(row["input_ids"])
    if missing:
        row["input_ids"] = F.pad(row["input_ids"], (0, missing))
        row["labels"] = F.pad(row["labels"], (0, missing), value=IGNORE_INDEX)
        row["position_ids"] = F.pad(row["position_ids"], (0, missing))
        if "influence" in row:
            row["influence"] = F.pad(row["influence"], (0, missing))
    return row


def collate_rows(rows: list[Row]) -> PackedBatch:
    """Stack sequences with the same keys; pad shorter ones on the right, after their last boundary."""
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=IGNORE_INDEX)
    batch = PackedBatch(
        input_ids=pad_sequence([row["input_ids"] for row in rows], batch_first=True),
        labels=labels,
        position_ids=pad_sequence([row["position_ids"] for row in rows], batch_first=True),
        document_boundaries=[row["document_boundaries"] for row in rows],
        scored=labels.ne(IGNORE_INDEX).numpy(),
    )
    if "influence" in rows[0]:
        batch["influence"] = pad_sequence([row["influence"] for row in rows], batch_first=True)
    if "text" in rows[0]:
        batch["text"] = [row["text"] for row in rows]
        batch["offsets"] = pad_sequence([row["offsets"] for row in rows], batch_first=True)
        batch["names"] = [row["name"] for row in rows]
        batch["sets"] = [row.get("set", "") for row in rows]
        batch["special_tokens"] = [row.get("special_tokens", False) for row in rows]
    return batch


def collate_examples(examples: Sequence[Mapping[str, Any]] | Mapping[str, Tensor]) -> PackedBatch:
    """Make a batch of examples of a Hugging Face dataset in main memory, as the ``collate_fn`` of a loader.

    As in Hugging Face models, labels are not shifted: ``labels[t]`` is token ``t``, or ``IGNORE_INDEX``. The first
    token of each document is not scored, because it has no context.

    Args:
        examples: Mappings with ``input_ids`` and optionally ``labels`` (by default all tokens), ``attention_mask`` (0
            for padding, on either side) and ``position_ids`` (they start at 0, and a document begins where they
            restart). Other keys are ignored. Or a batch of such examples: one mapping with ``[B, T]`` tensors.

    Raises:
        ValueError: If labels are shifted, positions skip or start above 0, or an example has no tokens.

    Example:
        >>> batch = collate_examples([{"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}, {"input_ids": [9, 3]}])
        >>> batch["labels"], batch["document_boundaries"]
        (tensor([[-100,    6, -100,    8],
                [-100,    3, -100, -100]]), [[0, 2, 4], [0, 2]])
    """
    if isinstance(examples, Mapping):
        examples = [dict(zip(examples, values, strict=True)) for values in zip(*examples.values(), strict=True)]
    return collate_rows(list(map(_example_row, examples)))


def _example_row(example: Mapping[str, Any]) -> Row:
    # A dataset may keep its tensors on an accelerator.
    example = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in example.items()}
    ids = np.asarray(example.get("input_ids", ()), dtype=np.int64)
    kept = np.asarray(example.get("attention_mask", np.ones_like(ids)), dtype=bool)
    if not kept.any():
        raise ValueError(f"An example needs `input_ids`, but has {sorted(example)}: tokenize it, or leave it out.")
    labels = torch.tensor(np.asarray(example.get("labels", ids))[kept])
    positions = np.asarray(example.get("position_ids", np.arange(len(ids))))[kept]
    starts = find_restarts(torch.from_numpy(positions), padding=int(kept.argmax())).numpy()
    row = make_row(ids[kept], np.append(starts, kept.sum()))
    unscored = labels.eq(IGNORE_INDEX)
    if (labels.ne(row["input_ids"]) & ~unscored).any():
        raise ValueError(
            f"`labels` must be the `input_ids` or {IGNORE_INDEX} at the same position, as in Hugging Face models: do"
            " not shift them."
        )
    row["labels"][unscored] = IGNORE_INDEX
    return row
