"""Store the token weights of training sequences while several processes compute them, any of which may be killed."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset
from typing_extensions import override

from datamodules.influence.store import DONE, DTYPE, FORMAT, HEADER, WEIGHTS, check_identity, missing_rows, read_header
from datamodules.packing.packing import PackedRows
from datamodules.packing.sequences import Row, collate_rows
from lightning_modules.batch import PackedBatch
from lightning_modules.utilities.files import writable_folder, write_atomically
from lightning_modules.utilities.locks import exclusive

_CHUNK = 1 << 24  # weights that are in memory at once


def influence_folder(cache_dir: Path, made_from: dict[str, Any]) -> Path:
    """Return the default folder of weights, named by a hash of everything they depend on."""
    content = json.dumps([FORMAT, made_from], sort_keys=True)
    return cache_dir / "influence" / hashlib.sha256(content.encode()).hexdigest()


class InfluenceWriter:
    """Writer of token weights to a folder that becomes an :class:`InfluenceStore` when all rows are written.

    Any number of processes write their rows at the places of their tokens in the stream of ``tokens`` tokens. A row is
    marked as done when its weights are on the disk, so a torn row is computed again and a complete one never. All
    machines must share the folder.

    ``made_from`` is everything the weights depend on: the sequences' `PackedRowDataset.identity`, ``gamma``, ..
    """

    def __init__(self, folder: Path, made_from: dict[str, Any], rows: PackedRows, tokens: int) -> None:
        if (made_from["gamma"] or 0) > float(np.finfo(DTYPE).max):  # or likely tokens would have infinite weights
            raise ValueError(
                f"Stored weights are float16: `gamma` must be at most {np.finfo(DTYPE).max}, got {made_from['gamma']}."
            )
        self.folder = folder
        self.made_from = made_from
        self.rows = rows
        self.tokens = tokens
        self._prepare_folder()

    def remaining(self) -> NDArray[np.int64]:
        """Return the ascending indices of the rows that are not computed yet."""
        return missing_rows(self.folder)

    def write(self, numbers: Sequence[int], weights: NDArray[np.float32]) -> None:
        """Store ``[len(numbers), sequence_length]`` weights of the rows with these indices, durably.

        Bytes are written, not mapped: processes on several machines may write to the same page of a file.

        Raises:
            OSError: If not all bytes can be written, for example on a full disk; no row is marked as done then.
        """
        # Buffered, because a raw write may write less than it is given without an error.
        with (self.folder / WEIGHTS).open("r+b") as file:
            for number, row_weights in zip(numbers, narrow(weights, self.made_from["gamma"]), strict=True):
                first = 0  # token of the segment in the row; the padding at the end is not stored
                for start, stop in self.rows.row(number):
                    end = first + int(stop - start)
                    file.seek(int(start) * DTYPE.itemsize)
                    file.write(row_weights[first:end].tobytes())
                    first = end
            file.flush()
            os.fsync(file.fileno())
        with (self.folder / DONE).open("r+b") as file:
            for number in numbers:
                file.seek(number)
                file.write(b"\1")
            file.flush()
            os.fsync(file.fileno())

    def statistics(self) -> dict[str, float]:
        """Compute statistics of the scored tokens of all rows: those of weights, or the mean loss."""
        total = 0.0
        above_1 = at_cap = 0
        cap = self.made_from["gamma"]
        with (self.folder / WEIGHTS).open("rb") as file:
            while True:
                values = np.fromfile(file, DTYPE, _CHUNK)
                if not len(values):
                    break
                total += float(values.sum(dtype=np.float64))
                if cap is not None:
                    above_1 += int(np.count_nonzero(values > 1))
                    at_cap += int(np.count_nonzero(values >= cap))
        segments = self.rows.segments
        # The first token of a document is not scored, and has weight 1. Tokens that are not in any row have weight 0.
        firsts = len(segments) if self.made_from["isolate_documents"] else len(self.rows)
        if cap == 1:
            at_cap -= firsts
        scored = max(int((segments[:, 1] - segments[:, 0]).sum()) - firsts, 1)
        if cap is None:  # the loss of a token that is not scored is 0
            return {"loss_mean": total / scored}
        return {
            "weight_mean": (total - firsts) / scored,
            "weight_above_1": above_1 / scored,
            "weight_at_cap": at_cap / scored,
        }

    def _prepare_folder(self) -> None:
        """Create the files, of which the header is the last one, or check that they are for the same weights."""
        remedy = "Choose another folder with `--output`."
        writable_folder(self.folder, remedy=remedy)
        with exclusive(self.folder / WEIGHTS):  # no two processes create them
            header = read_header(self.folder, remedy=f"Delete the folder. {remedy}")
            if header is not None:
                check_identity(self.folder, header["made_from"], self.made_from, remedy=remedy)
                return
            for name, size in ((WEIGHTS, self.tokens * DTYPE.itemsize), (DONE, len(self.rows))):
                with (self.folder / name).open("wb") as file:
                    file.truncate(size)
                    os.fsync(file.fileno())
            header = {"format": FORMAT, "tokens": self.tokens, "rows": len(self.rows), "made_from": self.made_from}
            write_atomically(self.folder / HEADER, (json.dumps(header, indent=2) + "\n").encode())


def _collate_numbered(items: list[tuple[int, Row]]) -> tuple[list[int], PackedBatch]:
    return [number for number, _ in items], collate_rows([row for _, row in items])


class InfluenceRows(LightningDataModule):
    """Data module of the sequences that have no weights yet, each for one process.

    ``data`` is the `PackedTextDataModule` of the sequences; its type is not imported because its module imports this
    one. The default folder is in its cache.
    """

    def __init__(self, data: Any, made_from: dict[str, Any], folder: Path | None = None) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # the last rows need not suffice for all
        self.data = data
        self.made_from = made_from
        self.folder = folder
        self.remaining = 0  # sequences of all processes without weights when the run began
        self.writer: InfluenceWriter
        self._missing: Dataset[tuple[int, Row]]

    @override
    def prepare_data(self) -> None:
        self.data.training_rows()  # tokenizes if needed

    @override
    def setup(self, stage: str) -> None:
        rows = self.data.existing_rows()
        rows.loss_on_prompt = True  # prompts get weights as well, whether or not training scores them
        made_from = rows.identity() | self.made_from
        self.folder = self.folder or influence_folder(self.data.cache_dir, made_from)
        self.writer = InfluenceWriter(self.folder, made_from, rows.rows, len(rows.store.tokens))
        missing = self.writer.remaining()
        self.remaining = len(missing)
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        if self.trainer:  # no process may write rows before all processes have listed the missing ones
            self.trainer.strategy.barrier("influence")
        numbered: Any = StackDataset(range(len(rows)), rows)  # type: ignore[arg-type]  # any sequence will do
        self._missing = Subset(numbered, missing[rank::world_size].tolist())

    @override
    def predict_dataloader(self) -> DataLoader[tuple[int, Row]]:
        options = {**self.data.loader_options(), "collate_fn": _collate_numbered}
        return DataLoader(self._missing, batch_size=self.data.batch_size, **options)

    def write(self, numbers: list[int], weights: Tensor) -> None:
        """Store ``[B, T]`` weights of the sequences with these indices."""
        self.writer.write(numbers, weights.float().cpu().numpy())


def narrow(weights: NDArray[np.float32], cap: float | None) -> NDArray[np.float16]:
    """Convert values to float16; weights at the cap are rounded up, so that they stay at the cap."""
    if cap is None:
        return weights.astype(DTYPE)
    top = DTYPE.type(cap)
    if float(top) < cap:
        top = np.nextafter(top, DTYPE.type(np.inf))
    return np.where(weights >= np.float32(cap), top, weights.astype(DTYPE))
