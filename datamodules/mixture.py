"""Train on several corpora, each with its share of the rows."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from itertools import chain
from typing import Any, NotRequired, TypedDict

import jsonargparse
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.evaluation_documents import DocumentDataset
from datamodules.packing.samplers import MixtureSampler
from datamodules.packing.sequences import PackedRowDataset, Row
from datamodules.sources.documents import Source
from datamodules.sources.splits import Split
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash

# Settings of the training as a whole, which a source cannot change.
_COMMON = ("tokenizer", "tokenizer_revision", "sequence_length")
_NOT_PASSED_ON = ("batch_size", "validation_batch_size", "num_workers", "seed", "influence", "curriculum")

_log = logging.getLogger(__name__)


class MixtureSource(TypedDict):
    """One source of a mixture."""

    class_path: str  # of a data module such as `datamodules.TextDataModule`
    init_args: NotRequired[dict[str, Any]]  # missing ones of `PackedTextDataModule` are the mixture's
    weight: NotRequired[float]  # 1 if not given


class MixtureDataModule(PackedTextDataModule):
    """Rows of several data modules by weight; see `MixtureSampler` for their order.

    Weights are shares of rows, and so of tokens. An epoch ends before a source would begin again; the others continue
    in the next one where they stopped. No row repeats before all of its source have been seen, and the log reports how
    often each source is seen when training begins. A source may be used for evaluation only.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        sources: The data modules by names of your choice, each with ``class_path``, ``init_args`` and ``weight``. They
            take the mixture's settings, such as ``long_documents``, unless they set them.
        weights: Weights by source, in place of those in `sources`; ``longce select --weights`` writes them.
        evaluate_on: Sources whose validation and test documents are evaluated on; null for all. `validation_documents`
            and `test_documents` count those of each source.
        **kwargs: See :class:`PackedTextDataModule`.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        sources: dict[str, MixtureSource],
        weights: dict[str, float] | None = None,
        evaluate_on: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        if self.influence:
            raise ValueError("Rows of a mixture have no stored token weights: leave `influence` out.")
        if not sources:
            raise ValueError("`sources` is empty: name at least one data module.")
        if weights is not None and (other := sorted(set(weights) ^ set(sources))):
            raise ValueError(f"`weights` and `sources` must name the same sources, and {other} are in one only.")
        if unknown := set(evaluate_on or ()) - set(sources):
            raise ValueError(f"`evaluate_on` names {sorted(unknown)}, but the sources are {sorted(sources)}.")
        settings = {name: value for name, value in kwargs.items() if name not in _NOT_PASSED_ON and value is not None}
        self.weights: dict[str, float] = {}
        self.modules: dict[str, PackedTextDataModule] = {}
        for name, source in sources.items():
            weight = float((weights or {}).get(name, source.get("weight", 1.0)))
            if not 0 < weight < float("inf"):
                raise ValueError(f"The weight of source {name!r} must be above 0, got {weight}. Or leave it out.")
            self.weights[name] = weight
            with _naming(name):
                self.modules[name] = _module(source, settings | {"tokenizer": tokenizer})
        self.evaluated = {name: self.modules[name] for name in evaluate_on or sources}
        self.mixed_rows: dict[str, PackedRowDataset] = {}

    @override
    def source(self, split: Split) -> Source | None:
        raise ValueError("The documents of a mixture are those of its `modules`.")

    @override
    def training_rows(self) -> PackedRowDataset | None:
        raise ValueError(
            "A mixture has rows of several sources: inspect them, or make token weights, for each source by itself."
        )

    @override
    def prepare_data(self) -> None:
        stage = self._stage()
        for name, module in self.evaluated.items():
            with _naming(name):
                module._check_evaluation_source(stage)
        if stage == "fit":
            self.check_trainer()
            for name, module in self.modules.items():
                with _naming(name):
                    if tokenizer_hash(module.tokenizer) != tokenizer_hash(self.tokenizer):
                        raise ValueError("its tokenizer differs. All rows of a training need one vocabulary.")
                    if module._token_store() is None and name not in self.evaluated:
                        raise ValueError("it has nothing to train on. Leave it out, or evaluate on it.")

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            rows = {name: module.training_rows() for name, module in self.modules.items()}
            self.mixed_rows = {name: each for name, each in rows.items() if each is not None}
        if stage in ("fit", "validate"):
            self.validation = self._chained("validation")
        if stage in ("test", "predict"):
            self.test = self._chained("test")

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        if not self.mixed_rows:
            raise ValueError("The mixture has no training rows: it only evaluates, or `setup('fit')` was not called.")
        rank, world_size = self._reader()
        sampler = MixtureSampler(
            {name: len(rows) for name, rows in self.mixed_rows.items()},
            self.weights,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        for name, count in sampler.counts.items():
            rank_zero_only(_log.info)(
                f"{name}: {count} of its {sampler.rows_of[name]} rows in each epoch of {len(sampler) * world_size}."
            )
        return self._training_loader(list(self.mixed_rows.values()), sampler)

    def _chained(self, split: Split) -> DocumentDataset:
        """Join the evaluation documents of all sources."""
        datasets = [each._documents(split) for each in self.evaluated.values()]
        return DocumentDataset(
            chain.from_iterable(each.documents for each in datasets),
            self.tokenizer,
            length=datasets[0].length,
            add_special_tokens=self.add_special_tokens,
        )


def _module(source: MixtureSource, settings: Mapping[str, Any]) -> PackedTextDataModule:
    """Make the data module of a source, with the mixture's settings unless it sets them."""
    given = dict(source.get("init_args") or {})
    for common in _COMMON:
        if common in given and given[common] != settings.get(common):
            raise ValueError(f"it has `{common}` = {given[common]!r}, which is the mixture's to set. Leave it out.")
    if unfit := sorted(set(given) & set(_NOT_PASSED_ON)):
        raise ValueError(f"it has {unfit}, which have no meaning for a part of a mixture. Leave them out.")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PackedTextDataModule, "data")
    plain = {key: asdict(value) if is_dataclass(value) else value for key, value in settings.items()}  # type: ignore[arg-type]
    config = {"class_path": source["class_path"], "init_args": plain | given}
    return parser.instantiate(parser.parse_object({"data": config})).data


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the source to an error."""
    try:
        yield
    except (ValueError, jsonargparse.ArgumentError) as error:
        raise ValueError(f"Source {name!r} of the mixture: {error}") from error
