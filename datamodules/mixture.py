"""Train on a mixture of corpora, each with its fraction of the sequences."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, NotRequired, TypedDict

import jsonargparse
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packed_text import PackedTextDataModule
from datamodules.packing.evaluation_documents import JoinedDocuments
from datamodules.packing.samplers import MixtureSampler
from datamodules.packing.sequences import PackedRowDataset, Row
from datamodules.sources.documents import Source
from datamodules.sources.splits import Split
from lightning_modules.models.tokenization.tokenizer import tokenizer_hash

# Settings of the whole run, which a source cannot change.
_COMMON = ("tokenizer", "tokenizer_revision", "sequence_length", "pose")
_NOT_PASSED_ON = (
    "batch_size",
    "validation_batch_size",
    "validation_sets",
    "num_workers",
    "seed",
    "influence",
    "curriculum",
)

_log = logging.getLogger(__name__)


class MixtureSource(TypedDict):
    """One source of a mixture."""

    class_path: str  # of a data module such as `datamodules.TextDataModule`
    init_args: NotRequired[dict[str, Any]]  # missing arguments of `PackedTextDataModule` come from the mixture
    weight: NotRequired[float]  # 1 by default


class MixtureDataModule(PackedTextDataModule):
    """Weighted mixture of the sequences of several data modules; see `MixtureSampler` for their order.

    Weights are fractions of the sequences, and therefore of the tokens. An epoch ends before any source would repeat;
    the others continue in the next epoch where they stopped. No sequence repeats before all sequences of its source
    have been used, and the log reports each source's sequences per epoch when training begins. A source may be used for
    evaluation only.

    Args:
        tokenizer: Tokenizer of the model: hub id or local folder.
        sources: Data modules by names of your choice, each with ``class_path``, ``init_args`` and ``weight``. They
            inherit the mixture's settings, such as ``long_documents``, unless they set them.
        weights: Weights by source, which replace those in `sources`.
        evaluate_on: Sources with documents to validate and test on; null for all. `train_documents`,
            `validation_documents` and `test_documents` apply to each source.
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
            raise ValueError("A mixture does not support stored token weights: remove `influence`.")
        unmatched = set() if weights is None else set(weights) ^ set(sources)
        if unmatched:
            raise ValueError(
                f"`weights` and `sources` must name the same sources, but {sorted(unmatched)} are only in one of them."
            )
        unknown = set(evaluate_on or ()) - set(sources)
        if unknown:
            raise ValueError(f"`evaluate_on` names {sorted(unknown)}, but the sources are {sorted(sources)}.")
        settings = {}
        defaults = inspect.signature(PackedTextDataModule).parameters
        for name, value in kwargs.items():
            is_unset = value is None and defaults[name].default is None  # a source may have a default of its own
            if name not in _NOT_PASSED_ON and not is_unset:
                settings[name] = value
        self.weights: dict[str, float] = {}
        self.modules: dict[str, PackedTextDataModule] = {}
        for name, source in sources.items():
            weight = float((weights or {}).get(name, source.get("weight", 1.0)))
            if not 0 < weight < float("inf"):
                raise ValueError(f"The weight of source {name!r} must be above 0, got {weight}: change or remove it.")
            self.weights[name] = weight
            with _source_errors(name):
                self.modules[name] = _make_module(source, settings | {"tokenizer": tokenizer})
        self.evaluated = {name: self.modules[name] for name in evaluate_on or sources}
        self.mixed_rows: dict[str, PackedRowDataset] = {}

    @override
    def source(self, split: Split) -> Source | None:
        raise ValueError(
            "A mixture has documents and sequences of several sources: inspect them, or compute token weights, one"
            " source at a time."
        )

    @override
    def prepare_data(self) -> None:
        stage = self._trainer_stage()
        if self.validation_sets and stage in ("fit", "validate"):
            self._check_evaluation_source(stage)
        for name, module in self.evaluated.items():
            with _source_errors(name):
                module._check_evaluation_source(stage)
        if stage == "fit":
            self.check_trainer()
            for name, module in self.modules.items():
                with _source_errors(name):
                    if tokenizer_hash(module.tokenizer) != tokenizer_hash(self.tokenizer):
                        raise ValueError("its tokenizer differs, but all sequences of a run need one vocabulary.")
                    if module._token_store() is None and name not in self.evaluated:
                        raise ValueError("it has no training documents. Remove it, or add it to `evaluate_on`.")

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.mixed_rows = {}
            for name, module in self.modules.items():
                rows = module.training_rows()
                if rows is not None:
                    number = len(self.mixed_rows)
                    rows.pose_seed = (int(self.seed), number)  # so that two sources have different skips
                    self.mixed_rows[name] = rows
        if stage in ("fit", "validate"):
            self.validation = self._read_sets() or self._join_documents("validation")
        if stage in ("test", "predict"):
            self.test = self._join_documents("test", prompts=stage == "predict")

    @override
    def train_dataloader(self) -> DataLoader[Row]:
        rank, world_size = self._reader_rank()
        sampler = MixtureSampler(
            {name: len(rows) for name, rows in self.mixed_rows.items()},
            self.weights,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        epoch = len(sampler) * world_size
        for name, count in sampler.counts.items():
            rows = sampler.rows_of[name]
            rank_zero_only(_log.info)(
                f"{name}: each epoch of {epoch:,} sequences has {count:,} of its {rows:,} sequences."
            )
            needed = self._needed_sequences() * count // epoch
            self.modules[name].warn_of_repetition(rows, needed, source=f"Source {name!r} of the mixture: ")
        return self._training_loader(list(self.mixed_rows.values()), sampler)

    @property
    @override
    def largest_token(self) -> int | None:
        found = [rows.store.manifest["largest_token"] for rows in self.mixed_rows.values()]
        return max(found, default=None)

    def _join_documents(self, split: Split, *, prompts: bool = False) -> JoinedDocuments:
        """Join the evaluation documents of all sources."""
        return JoinedDocuments([each._read_documents(split, prompts=prompts) for each in self.evaluated.values()])


def _make_module(source: MixtureSource, settings: Mapping[str, Any]) -> PackedTextDataModule:
    """Create the data module of a source; settings that the source omits are those of the mixture."""
    given = dict(source.get("init_args") or {})
    changed = [name for name in _COMMON if name in given and given[name] != settings.get(name)]
    unfit = sorted({*changed, *given.keys() & set(_NOT_PASSED_ON)})
    if unfit:
        raise ValueError(f"it sets {unfit}, which only the mixture can set: remove them.")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PackedTextDataModule, "data")
    plain = {key: asdict(value) if is_dataclass(value) else value for key, value in settings.items()}  # type: ignore[arg-type]
    config = {"class_path": source["class_path"], "init_args": plain | given}
    return parser.instantiate(parser.parse_object({"data": config})).data


@contextmanager
def _source_errors(name: str) -> Iterator[None]:
    """Prefix errors with the name of the source."""
    try:
        yield
    except (ValueError, jsonargparse.ArgumentError) as error:
        raise ValueError(f"Source {name!r} of the mixture: {error}") from error
