"""Hand out the training rows whose token weights are still missing, and keep the weights."""

from pathlib import Path
from typing import Any

from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset
from typing_extensions import override

from datamodules.influence.writer import InfluenceWriter, influence_folder
from datamodules.packing.sequences import Row, collate_rows
from lightning_modules.batch import PackedBatch


def collate_numbered(items: list[tuple[int, Row]]) -> tuple[list[int], PackedBatch]:
    """Collate rows, and keep their numbers."""
    return [number for number, _ in items], collate_rows([row for _, row in items])


class InfluenceRows(LightningDataModule):
    """Data module of the rows without weights, each for one process.

    ``data`` is the `PackedTextDataModule` whose rows they are; its module imports this one.

    Attributes:
        folder: Where to keep the weights; by default in the cache of ``data``, named by all they depend on.
        remaining: Rows without weights when the run began, of all processes.
    """

    def __init__(self, data: Any, made_from: dict[str, Any], folder: Path | None = None) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # the last rows need not suffice for all
        self.data = data
        self.made_from = made_from
        self.folder = folder
        self.remaining = 0
        self.writer: InfluenceWriter
        self._missing: Dataset[tuple[int, Row]]

    @override
    def prepare_data(self) -> None:
        self.data.training_rows()  # tokenizes if needed

    @override
    def setup(self, stage: str) -> None:
        rows = self.data.training_rows()
        if rows is None:
            raise ValueError(f"{type(self.data).__name__} has no training rows: there is nothing to weigh.")
        rows.loss_on_prompt = True  # every token gets its weight, whether or not it is trained on later
        made_from = rows.identity() | self.made_from
        self.folder = self.folder or influence_folder(self.data.cache_dir, made_from)
        self.writer = InfluenceWriter(self.folder, made_from, rows.rows, len(rows.store.tokens))
        missing = self.writer.remaining()
        self.remaining = len(missing)
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        if self.trainer:  # no process may add rows before all have seen the same ones missing
            self.trainer.strategy.barrier("influence")
        numbered: Any = StackDataset(range(len(rows)), rows)  # type: ignore[arg-type]  # any sequence will do
        self._missing = Subset(numbered, missing[rank::world_size].tolist())

    @override
    def predict_dataloader(self) -> DataLoader[tuple[int, Row]]:
        options = {**self.data.loader_options(), "collate_fn": collate_numbered}
        return DataLoader(self._missing, batch_size=self.data.batch_size, **options)

    def write(self, numbers: list[int], weights: Tensor) -> None:
        """Keep ``[B, T]`` weights of the rows with these numbers."""
        self.writer.write(numbers, weights.float().cpu().numpy())
