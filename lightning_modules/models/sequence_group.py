"""The processes of a sequence group (DeepSpeed Ulysses), which share sequences too long for one device.

Each of the P processes of a group holds ``T / P`` tokens of each sequence. Only attention looks at other tokens: there,
processes exchange tokens for heads, and each computes ``1 / P`` of the heads for the whole sequence (Jacobs et al.,
2023, https://arxiv.org/abs/2309.14509). DeepSpeed does the exchange. The attention function stays ours, so that packed
documents stay separate; DeepSpeed's `register_with_transformers` would replace it for all models of the process.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to, pack_sequence
from lightning_modules.models.attention import DOCUMENT_SDPA, document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.probes import short_windows
from lightning_modules.models.optimizations import eval_mode


class SequenceGroup:
    """The P processes that share each sequence. All of them must call the same methods in the same order."""

    def __init__(self, processes: dist.ProcessGroup) -> None:
        import deepspeed.comm  # an optional package, and a slow one to import

        self.processes = processes
        self.size = processes.size()
        self.rank = processes.rank()
        # Use the existing process group.
        deepspeed.comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self._exchanges: dict[tuple[int, ...], Callable[..., Any]] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `document_attention` of whole sequences from this process's shard of their tokens.

        ``query`` is ``[B, H, T / P, D]``, ``key`` and ``value`` are ``[B, H_kv, T / P, D]``, and the output is
        ``[B, T / P, H * D]`` without attention weights. ``document_boundaries`` are those of the whole sequences.
        """
        batch_size, heads, tokens, width = query.shape
        key_heads = key.shape[1]
        # DeepSpeed gathers positions, although they are unused (EABF has already scaled the queries).
        # Shape ``[B, T / P]``; the values do not matter.
        kwargs.setdefault("position_ids", torch.zeros(batch_size, tokens, dtype=torch.int64, device=query.device))
        # DeepSpeed's object is made for one shape; the length may vary.
        shape = (batch_size, heads, width, key_heads)
        if shape not in self._exchanges:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            self._exchanges[shape] = UlyssesSPAttentionHF(
                document_attention,
                batch_size=batch_size,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key_heads,
                num_hidden_layers=0,  # DeepSpeed uses it for debugging only
                process_group=self.processes,
                seq_length_is_variable=True,
            )
        # DeepSpeed overwrites this number in the layer, which would be wrong for the passes of a single process.
        groups = getattr(module, "num_key_value_groups", None)
        try:
            return self._exchanges[shape](module, query, key, value, None, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups

    def shard(self, batch: PackedBatch) -> PackedBatch:
        """Return this process's shard of a ``[B, T]`` batch that all processes of the group hold.

        A shard has ``ceil(T / P)`` tokens of each sequence; padding on the right is a separate document. It has one
        more label, because its last token predicts the first token of the next shard, which does not score it.
        """
        # Rounded up, because all processes must exchange tensors of the same shape.
        shard_length = -(-batch["input_ids"].shape[1] // self.size)
        end = self.size * shard_length
        labels = self._slice_columns(batch["labels"], IGNORE_INDEX).clone()
        labels[:, 0] = IGNORE_INDEX  # scored by the previous shard
        scored = self._slice_columns(torch.from_numpy(batch["scored"]), False).clone()
        scored[:, 0] = False
        return PackedBatch(
            input_ids=self._slice_columns(batch["input_ids"], 0)[:, :shard_length],
            labels=labels,
            position_ids=self._slice_columns(batch["position_ids"], 0)[:, :shard_length],
            # Boundaries stay those of whole sequences: attention sees these after the exchange.
            document_boundaries=[[*row, end] if row[-1] < end else row for row in batch["document_boundaries"]],
            scored=scored.numpy(),
        )

    def _slice_columns(self, values: Tensor, fill: float) -> Tensor:
        """Return the columns of this process's shard and the column after it."""
        length = values.shape[1]
        shard_length = -(-length // self.size)
        # One more column: the last shard also needs a column after its own.
        padded = values.new_full((values.shape[0], self.size * shard_length + 1), fill)
        padded[:, :length] = values
        return padded[:, self.rank * shard_length : (self.rank + 1) * shard_length + 1]

    def check_same_batch(self, batch: PackedBatch) -> None:
        """Raise a ``ValueError`` unless all processes hold the same sequences: the loss would not reveal it."""
        checksum = zlib.crc32(repr(batch["document_boundaries"]).encode())
        for values in (batch["input_ids"], batch["position_ids"]):
            checksum = zlib.crc32(values.cpu().numpy().tobytes(), checksum)
        # The maxima of c and -c add up to 0 only if all checksums are equal, so one exchange is enough.
        extremes = torch.tensor([checksum, -checksum], device=batch["input_ids"].device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.processes)
        if extremes.sum() != 0:
            raise ValueError(
                f"The {self.size} processes of a group must get the same sequences, but got different ones: distribute"
                " them in the data module by `trainer.distributed_sampler_kwargs`, not by the global rank."
            )

    def log_likelihood(self, backbone: Backbone, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` log-likelihoods of this process's batch; the group scores one process's batch at a time."""
        device = batch["input_ids"].device
        result = torch.empty(0)
        inputs = PackedBatch(
            input_ids=batch["input_ids"],
            labels=batch["labels"],
            position_ids=batch["position_ids"],
            document_boundaries=batch["document_boundaries"],
            scored=batch["scored"],
        )
        for owner in range(self.size):
            # Through main memory, because the processes do not know each other's shapes.
            sent: list[Any] = [batch_to(inputs, torch.device("cpu")) if owner == self.rank else None]
            dist.broadcast_object_list(sent, group=self.processes, group_src=owner, device=device)
            scored = self.sharded_log_likelihood(backbone, batch_to(sent[0], device))
            result = scored if owner == self.rank else result
        return result

    def sharded_log_likelihood(self, backbone: Backbone, batch: PackedBatch, window: int | None = None) -> Tensor:
        """Return ``[B, T]`` log-likelihoods of sequences that all processes of the group hold.

        Gradients flow to the tokens of this process's shard only; the processes together have those of all tokens.
        """
        # 1. Score the tokens of this shard, and put them in their place in the whole sequences.
        scored = backbone(self.shard(batch), exchange=self.attend, window=window)
        shard_length = scored.shape[1] - 1
        before = self.rank * shard_length
        # Column 0 of a shard is unscored, so neighbors overlap in a zero.
        own = F.pad(scored, (before, (self.size - 1 - self.rank) * shard_length))
        # 2. Collect the other shards. Each token is in one of them, and 0 elsewhere, so a sum does it.
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self.processes)
        # 3. Use our own tokens with their gradient.
        column = torch.arange(whole.shape[1], device=whole.device)
        is_own = (column > before) & (column <= before + shard_length)
        return torch.where(is_own, own, whole)[:, : batch["labels"].shape[1]]

    def check_backbone(self, backbone: Backbone) -> None:
        """Raise a ``ValueError`` if the group scores a few tokens differently from a single process."""
        name = type(backbone.base_model).__name__
        if backbone.attention != DOCUMENT_SDPA or not backbone.isolates_documents:
            raise ValueError(
                f"Sequence parallelism does not support `{name}` with '{backbone.attention}' attention: it needs"
                " `attn_implementation: sdpa`, and a model that isolates packed documents without masks."
            )
        generator = torch.Generator().manual_seed(0)
        # Two documents, with a boundary inside a shard for most sizes.
        tokens = torch.randint(backbone.vocabulary_size, (5 * self.size + 2,), generator=generator)
        batch = pack_sequence(tokens.to(backbone.device).split(4 * self.size))
        with torch.no_grad(), eval_mode(backbone), short_windows(backbone):
            alone = backbone(batch)
            together = self.sharded_log_likelihood(backbone, batch)
        autocast = torch.is_autocast_enabled(batch["input_ids"].device.type)
        half = autocast or backbone.base_model.dtype in (torch.bfloat16, torch.float16)
        # In half precision, other shapes of matrix products round differently.
        error = (alone - together).abs().max().item()
        if not error <= (0.5 if half else 0.01):
            raise ValueError(
                f"The log-likelihoods of `{name}` change by {error:.2g} nats if {self.size} processes share a sequence,"
                " because it mixes tokens outside of its attention. Use a `trainer.strategy` without"
                " `sequence_parallel_size`."
            )
