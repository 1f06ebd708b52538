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

from datamodules.influence.store import DONE, DTYPE, FORMAT, HEADER, WEIGHTS, check_identity, read_header
from datamodules.packing.packing import PackedRows
from datamodules.packing.sequences import Row, collate_rows
from lightning_modules.batch import PackedBatch
from lightning_modules.utilities.files import writable_folder, write_atomically
from lightning_modules.utilities.locks import exclusive


def influence_folder(cache_dir: Path, made_from: dict[str, Any]) -> Path:
    """Return the default folder of weights, named by a hash of everything they depend on."""
    return cache_dir / "influence" / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


class InfluenceWriter:
    """Writer of token weights to a folder that becomes an :class:`InfluenceStore` when all rows are written.

    Any number of processes write their rows at the places of their tokens in the stream of ``tokens`` tokens. A row is
    marked as done when its weights are on the disk, so a torn row is computed again and a complete one never. All
    machines must share the folder.

    ``made_from`` is everything the weights depend on: the sequences' `PackedRowDataset.identity`, ``gamma``, ..
    """

    def __init__(self, folder: Path, made_from: dict[str, Any], rows: PackedRows, tokens: int) -> None:
        if made_from["gamma"] > float(np.finfo(DTYPE).max):  # or likely tokens would have infinite weights
            raise ValueError(
                f"Stored weights are float16: `gamma` must be at most {np.finfo(DTYPE).max}, got {made_from['gamma']}."
            )
        self.folder = folder
        self.made_from = made_from
        self.rows = rows
        self.tokens = tokens
        self._prepare_folder()

    @property
    def header(self) -> dict[str, Any]:
        """The current header on disk."""
        header = read_header(self.folder)
        assert header is not None
        return header

    def remaining(self) -> NDArray[np.int64]:
        """Return the ascending indices of the rows that are not computed yet."""
        return np.flatnonzero(np.fromfile(self.folder / DONE, dtype=np.uint8) == 0)

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

    def finish(self) -> bool:
        """Complete the store if all rows are written, and return whether it is complete."""
        with exclusive(self.folder / WEIGHTS):
            if len(self.remaining()):
                return False
            if not self.header["complete"]:
                self._write_header(complete=True, statistics=self._statistics())
            return True

    def _statistics(self) -> dict[str, float]:
        """Compute statistics of the scored tokens."""
        values = np.memmap(self.folder / WEIGHTS, dtype=DTYPE, mode="r") if self.tokens else np.empty(0, DTYPE)
        total = above_1 = at_cap = 0.0
        scored = 0
        for row in range(len(self.rows)):
            segments = self.rows.row(row)
            weights = np.concatenate([values[start:stop] for start, stop in segments]).astype(np.float64)
            # The first token of a document is not scored; its weight 1 is not above 1, and below most caps.
            firsts = len(segments) if self.made_from["isolate_documents"] else 1
            scored += len(weights) - firsts
            total += float(weights.sum()) - firsts
            above_1 += int((weights > 1).sum())
            at_cap += int((weights >= self.made_from["gamma"]).sum())
        scored = max(scored, 1)
        return {"weight_mean": total / scored, "weight_above_1": above_1 / scored, "weight_at_cap": at_cap / scored}

    def _prepare_folder(self) -> None:
        """Create the files, of which the header is the last one, or check that they are for the same weights."""
        remedy = "Choose another folder with `--output`."
        writable_folder(self.folder, remedy=remedy)
        sizes = {WEIGHTS: self.tokens * DTYPE.itemsize, DONE: len(self.rows)}
        with exclusive(self.folder / WEIGHTS):  # no two processes create them
            header = read_header(self.folder)
            if header is not None:
                check_identity(self.folder, header["made_from"], self.made_from, remedy=remedy)
                for name, size in sizes.items():
                    path = self.folder / name
                    found = path.stat().st_size if path.exists() else 0
                    if found != size:
                        raise ValueError(f"'{path}' has {found:,} of {size:,} bytes: restore it, or delete the folder.")
                return
            for path in self.folder.iterdir():
                if not path.name.startswith(".") and path.name not in (WEIGHTS, DONE):
                    raise ValueError(f"'{self.folder}' contains other files, such as '{path.name}': use a new folder.")
            for name, size in sizes.items():
                with (self.folder / name).open("wb") as file:
                    file.truncate(size)
                    os.fsync(file.fileno())
            self._write_header(complete=False, statistics={})

    def _write_header(self, *, complete: bool, statistics: dict[str, float]) -> None:
        header = {
            "format": FORMAT,
            "complete": complete,
            "tokens": self.tokens,
            "made_from": self.made_from,
            "statistics": statistics,
        }
        write_atomically(self.folder / HEADER, (json.dumps(header, indent=2) + "\n").encode())


def collate_numbered(items: list[tuple[int, Row]]) -> tuple[list[int], PackedBatch]:
    """Collate sequences, and return their indices with the batch."""
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
        options = {**self.data.loader_options(), "collate_fn": collate_numbered}
        return DataLoader(self._missing, batch_size=self.data.batch_size, **options)

    def write(self, numbers: list[int], weights: Tensor) -> None:
        """Store ``[B, T]`` weights of the sequences with these indices."""
        self.writer.write(numbers, weights.float().cpu().numpy())


def narrow(weights: NDArray[np.float32], cap: float) -> NDArray[np.float16]:
    """Convert weights to float16; weights at the cap are rounded up, so that they stay at the cap."""
    top = DTYPE.type(cap)
    if float(top) < cap:
        top = np.nextafter(top, DTYPE.type(np.inf))
    return np.where(weights >= np.float32(cap), top, weights.astype(DTYPE))
