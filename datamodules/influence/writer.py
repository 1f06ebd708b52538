"""Store the token weights of training sequences while several processes compute them, any of which may be killed."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset
from typing_extensions import override

from datamodules.influence.store import DTYPE, FORMAT, HEADER, WEIGHTS, check_identity, read_header
from datamodules.packing.packing import PackedRows
from datamodules.packing.sequences import Row, collate_rows
from lightning_modules.batch import PackedBatch
from lightning_modules.utilities.files import (
    BUILDING,
    atomic_file,
    create_file,
    to_disk,
    writable_folder,
    write_atomically,
)
from lightning_modules.utilities.locks import exclusive

JOURNALS = "rows-*.journal"


def influence_folder(cache_dir: Path, made_from: dict[str, Any]) -> Path:
    """Return the default folder of weights, named by a hash of everything they depend on."""
    return cache_dir / "influence" / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


class InfluenceWriter:
    """Writer of token weights to a folder that becomes an :class:`InfluenceStore` when all rows are written.

    Each process appends its rows to its own journal, with row number and checksum, and waits for the disk: a torn row
    is computed again, a complete one never. `finish` merges the journals into the order of the ``tokens`` tokens of the
    stream. All machines must share the folder.

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
        self._record = np.dtype(
            [("row", "<i8"), ("weights", DTYPE, (made_from["sequence_length"],)), ("checksum", "<u4")]
        )
        self._prepare_folder()

    @property
    def header(self) -> dict[str, Any]:
        """The current header on disk."""
        header = read_header(self.folder)
        assert header is not None
        return header

    @property
    def complete(self) -> bool:
        """Whether the store has all rows."""
        return bool(self.header["complete"])

    def remaining(self) -> NDArray[np.int64]:
        """Return the ascending indices of the rows that are not computed yet."""
        missing = np.full(len(self.rows), not self.complete)
        for row, _ in self._read_journals():
            missing[row] = False
        return np.flatnonzero(missing)

    def write(self, numbers: Sequence[int], weights: NDArray[np.float32]) -> None:
        """Append ``[len(numbers), sequence_length]`` weights of the rows with these indices to the journal, durably."""
        records = np.zeros(len(numbers), self._record)
        records["row"] = numbers
        records["weights"] = narrow(weights, self.made_from["gamma"])
        records["checksum"] = [_record_checksum(record) for record in records]
        with self._own_journal.open("ab") as file:
            file.write(records.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> bool:
        """Merge the journals if all rows are written, and return whether the store is complete.

        Call it in one process, after the others are done.
        """
        with exclusive(self.folder / WEIGHTS):  # if two commands use one folder, only one merges
            if not self.complete:
                if len(self.remaining()):
                    return False
                with atomic_file(self.folder / WEIGHTS) as file:
                    statistics = self._merge_journals(file)
                self._write_header(complete=True, statistics=statistics)  # before the journals are deleted
            for pattern in (f"{BUILDING}{WEIGHTS}*", JOURNALS):
                for path in self.folder.glob(pattern):
                    path.unlink()
            return True

    def _merge_journals(self, file: BinaryIO) -> dict[str, float]:
        """Write every row's weights at the positions of its tokens; return statistics of the scored tokens."""
        file.truncate(self.tokens * DTYPE.itemsize)
        done = np.zeros(len(self.rows), dtype=bool)
        sums = np.zeros(3)
        for row, weights in self._read_journals():
            if done[row]:
                continue
            done[row] = True
            # 1. Write the weights of each segment at its place in the stream.
            segments = self.rows.row(row)
            *cuts, end = np.cumsum(segments[:, 1] - segments[:, 0])
            weights = weights[:end]  # without the padding
            for (start, _), chunk in zip(segments, np.split(weights, cuts), strict=True):
                file.seek(int(start) * DTYPE.itemsize)
                file.write(chunk.tobytes())
            # 2. Sum up. The first token of a document is not scored; its weight 1 is not above 1, and below most caps.
            firsts = len(segments) if self.made_from["isolate_documents"] else 1
            wide = weights.astype(np.float64)
            sums += [wide.sum() - firsts, (wide > 1).sum(), (wide >= self.made_from["gamma"]).sum()]
        unscored = len(self.rows.segments) if self.made_from["isolate_documents"] else len(self.rows)
        scored = self.rows.tokens - unscored
        names = ("weight_mean", "weight_above_1", "weight_at_cap")
        return dict(zip(names, (sums / max(scored, 1)).tolist(), strict=True))

    def _read_journals(self) -> Iterator[tuple[int, NDArray[np.float16]]]:
        """Yield index and weights of each complete row in the journals."""
        for journal in sorted(self.folder.glob(JOURNALS)):
            whole = journal.stat().st_size // self._record.itemsize
            for record in np.memmap(journal, self._record, mode="r", shape=(whole,)) if whole else ():
                if record["checksum"] == _record_checksum(record) and 0 <= record["row"] < len(self.rows):
                    yield int(record["row"]), record["weights"]

    @cached_property
    def _own_journal(self) -> Path:
        descriptor, path = create_file(self.folder, "rows-", ".journal")
        os.close(descriptor)
        to_disk(self.folder)
        return path

    def _prepare_folder(self) -> None:
        if not self.folder.is_dir():
            writable_folder(self.folder, remedy="Choose another folder with `--output`.")
        # List the folder before the header is read: another process may write the header in between.
        strangers = [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
        header = read_header(self.folder)
        if header is not None:
            check_identity(
                self.folder, header["made_from"], self.made_from, remedy="Choose another folder with `--output`."
            )
        elif strangers:
            raise ValueError(f"'{self.folder}' contains other files, such as '{strangers[0]}': use a new folder.")
        else:
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


def _record_checksum(record: np.void) -> int:
    return zlib.crc32(record["weights"].tobytes(), zlib.crc32(record["row"].tobytes()))
