"""Sequences longer than one device can train on: DeepSpeed Ulysses, several processes for the tokens of one sequence.

Each process of a group holds ``T / P`` tokens of each sequence. Only attention looks at other tokens: there, processes
exchange tokens for heads, and each computes ``1 / P`` of the heads of the whole sequence (Jacobs et al., 2023,
https://arxiv.org/abs/2309.14509). The exchange is DeepSpeed's; the attention function stays ours, so that packed
documents are kept apart (`register_with_transformers` would replace it for all models of the process).
"""

import importlib.util
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, packed_row
from lightning_modules.models.attention import DOCUMENT_SDPA, document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.training.fsdp import FullyShardedStrategy


class SequenceGroup:
    """The ``size`` (P) processes that share each row, by ``rank``; all must do the same things in the same order."""

    def __init__(self, processes: dist.ProcessGroup) -> None:
        import deepspeed.comm  # an optional package, and a slow one to import

        self.processes = processes
        self.size, self.rank = processes.size(), processes.rank()
        # Over the process group that is there already.
        deepspeed.comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self._exchanges: dict[tuple[int, ...], Callable[..., Any]] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `document_attention` of whole rows, of which this process has some tokens.

        ``query`` is ``[B, H, T / P, D]``, ``key`` and ``value`` ``[B, H_kv, T / P, D]``, the output
        ``[B, T / P, H * D]``; there are no attention weights. ``document_boundaries`` are those of the whole rows.
        """
        (rows, heads, tokens, width), key_heads = query.shape, key.shape[1]
        # Positions are unused below (EABF has scaled the queries already), but DeepSpeed gathers them.
        kwargs.setdefault("position_ids", torch.zeros(rows, tokens, dtype=torch.int64, device=query.device))
        shape = (rows, heads, width, key_heads)
        if shape not in self._exchanges:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            self._exchanges[shape] = UlyssesSPAttentionHF(
                document_attention,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key_heads,
                num_hidden_layers=0,  # for its debugging only
                process_group=self.processes,
                seq_length_is_variable=True,
            )
        # DeepSpeed sets it in the layer, and passes that are not shared would repeat keys as often as these.
        groups = getattr(module, "num_key_value_groups", None)
        try:
            return self._exchanges[shape](module, query, key, value, None, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups

    def part(self, batch: PackedBatch) -> PackedBatch:
        """Return this process's share of ``[B, T]`` rows that all processes of the group hold.

        It is ``ceil(T / P)`` tokens of each row, padded on the right as a document, and one label more: the last token
        predicts the first one of the next share, which does not count it. Document boundaries are those of whole rows.
        """
        share = -(-batch["input_ids"].shape[1] // self.size)
        end = self.size * share
        labels = self._cut(batch["labels"], IGNORE_INDEX).clone()
        labels[:, 0] = IGNORE_INDEX  # which the last token of the share before predicts
        return PackedBatch(
            input_ids=self._cut(batch["input_ids"], 0)[:, :share],
            labels=labels,
            position_ids=self._cut(batch["position_ids"], 0)[:, :share],
            document_boundaries=[[*row, end] if row[-1] < end else row for row in batch["document_boundaries"]],
        )

    def _cut(self, values: Tensor, fill: float) -> Tensor:
        """Return the columns of this process's share and the one after it."""
        length = values.shape[1]
        share = -(-length // self.size)
        padded = values.new_full((values.shape[0], self.size * share + 1), fill)
        padded[:, :length] = values
        return padded[:, self.rank * share : (self.rank + 1) * share + 1]

    def check_same(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` unless all processes hold the same rows: the loss would not show it."""
        content = batch["input_ids"].cpu().numpy().tobytes() + repr(batch["document_boundaries"]).encode()
        checksum = zlib.crc32(content)
        extremes = torch.tensor([checksum, -checksum], device=batch["input_ids"].device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.processes)
        if extremes.sum() != 0:
            raise ValueError(
                f"The {self.size} processes that share a row were given different ones: let the data module share rows"
                " out by `trainer.distributed_sampler_kwargs`, and not by the rank of each process."
            )

    def agreed(self, number: int) -> int:
        """Return the number that the first process of the group has."""
        sent = [number]
        dist.broadcast_object_list(sent, group=self.processes, group_src=0)
        return sent[0]

    def log_likelihood(self, backbone: Backbone, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` log-likelihoods (nats) of own rows; the processes of a group score each other's in turn."""
        device, own = batch["input_ids"].device, torch.empty(0)
        names = ("input_ids", "labels", "position_ids", "document_boundaries")
        rows = {name: batch[name] for name in names}  # type: ignore[literal-required]
        for owner in range(self.size):
            sent = [move_data_to_device(rows, "cpu") if owner == self.rank else None]
            dist.broadcast_object_list(sent, group=self.processes, group_src=owner, device=device)
            scored = self.shared_log_likelihood(backbone, move_data_to_device(sent[0], device))
            own = scored if owner == self.rank else own
        return own

    def shared_log_likelihood(self, backbone: Backbone, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` log-likelihoods (nats) of sequences that all processes of the group hold.

        Gradients flow to the tokens of this process's share only; the processes together have those of all tokens.
        """
        scored = backbone(self.part(batch), exchange=self.attend)
        share = scored.shape[1] - 1
        before = self.rank * share
        own = F.pad(scored, (before, (self.size - 1 - self.rank) * share))
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self.processes)  # each token has one summand that is not 0
        column = torch.arange(whole.shape[1], device=whole.device)
        return torch.where((column > before) & (column <= before + share), own, whole)[:, : batch["labels"].shape[1]]

    def check(self, backbone: Backbone) -> None:
        """Raise a ``ValueError`` if the processes together score a few tokens unlike each by itself."""
        name = type(backbone.base_model).__name__
        if backbone.attention != DOCUMENT_SDPA:
            raise ValueError(
                f"Processes cannot share the rows of `{name}` with '{backbone.attention}' attention: it takes"
                " `attn_implementation: sdpa`, and a model that keeps packed documents apart without masks."
            )
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(backbone.vocabulary_size, (5 * self.size + 2,), generator=generator)
        rows = packed_row(tokens.to(backbone.device).split(4 * self.size))
        with torch.no_grad(), eval_mode(backbone):
            alone, together = backbone(rows), self.shared_log_likelihood(backbone, rows)
        autocast = torch.is_autocast_enabled(rows["input_ids"].device.type)
        half = autocast or backbone.base_model.dtype in (torch.bfloat16, torch.float16)
        error = (alone - together).abs().max().item()
        if not error <= (0.5 if half else 0.01):
            raise ValueError(
                f"`{name}` gives tokens other log-likelihoods (by {error:.2g} nats) if {self.size} processes share a"
                " row: it looks at other tokens beside its attention. Set `trainer.strategy` to one without"
                " `sequence_parallel_size`."
            )


class _SharesRows(ParallelStrategy):
    """A strategy in which groups of neighbouring processes share each training row."""

    sequence_group: SequenceGroup | None = None

    def __init__(self, sequence_parallel_size: PositiveInt, **kwargs: Any) -> None:
        self.sequence_parallel_size = sequence_parallel_size
        super().__init__(**kwargs)

    def check_early(self) -> None:
        """Raise a ``ValueError`` if DeepSpeed is not installed, or the processes do not form groups."""
        # Not in the constructor: the command line would report a class that it cannot make, and not say why.
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError("Sequence parallelism needs the package deepspeed: pip install 'deepspeed>=0.19.8'.")
        check_processes(self.sequence_parallel_size, self.world_size)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.check_early()
        self.sequence_group = SequenceGroup(dist.new_subgroups(self.sequence_parallel_size)[0])

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Who reads which rows: all processes of a group the same."""
        size = self.sequence_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}


class UlyssesStrategy(_SharesRows, DDPStrategy):
    """DeepSpeed Ulysses: groups of processes share each training row; every process holds all weights.

    Args:
        sequence_parallel_size: Processes that share a row (P); a divisor of their number and of that of the model's
            attention heads.
        **kwargs: Arguments of Lightning's ``DDPStrategy``.
    """


class FullyShardedUlyssesStrategy(_SharesRows, FullyShardedStrategy):
    """The same over FSDP2: groups of processes share each training row, and all processes the weights.

    Args:
        sequence_parallel_size: As for `UlyssesStrategy`.
        **kwargs: Arguments of `FullyShardedStrategy`.
    """


def sequence_group(strategy: Strategy) -> SequenceGroup | None:
    """Return the processes that share rows with this one; None if each has other rows."""
    return strategy.sequence_group if isinstance(strategy, _SharesRows) else None


def sequence_parallel_size(trainer: Trainer) -> int:
    """Return how many processes share a row, once it is known that they can."""
    if not isinstance(trainer.strategy, _SharesRows):
        return 1
    trainer.strategy.check_early()
    return trainer.strategy.sequence_parallel_size


def check_processes(size: int, processes: int) -> None:
    """Raise a ``ValueError`` if processes do not form groups of this size."""
    if processes % size:
        raise ValueError(
            f"`sequence_parallel_size` is {size}, and {processes} process(es) do not form groups of {size}: set"
            " `trainer.devices` (times `trainer.num_nodes`) to a multiple of it."
        )
