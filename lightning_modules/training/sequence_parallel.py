"""Lightning strategies for sequence parallelism (DeepSpeed Ulysses): groups of processes share each sequence."""

import importlib.util
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from typing_extensions import override

from lightning_modules.functional.checks import check_count
from lightning_modules.models.sequence_group import SequenceGroup
from lightning_modules.training.fsdp import FullyShardedStrategy


class _SequenceParallelStrategy(ParallelStrategy):
    """A strategy in which groups of neighboring processes share each training sequence."""

    sequence_group: SequenceGroup | None = None

    def __init__(self, sequence_parallel_size: int, **kwargs: Any) -> None:
        self.sequence_parallel_size = sequence_parallel_size
        super().__init__(**kwargs)

    def check_early(self) -> None:
        """Raise a ``ValueError`` if DeepSpeed is missing, or the processes do not form groups."""
        # Not in the constructor, because the command line would replace the reason with a parser error.
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError("Sequence parallelism needs the deepspeed package: pip install 'deepspeed>=0.19.8'.")
        check_processes(self.sequence_parallel_size, self.world_size)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.check_early()
        self.sequence_group = SequenceGroup(dist.new_subgroups(self.sequence_parallel_size)[0])

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a distributed sampler that gives all processes of a group the same sequences."""
        size = self.sequence_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}


class UlyssesStrategy(_SequenceParallelStrategy, DDPStrategy):
    """DeepSpeed Ulysses: groups of processes share each training sequence; every process holds all weights.

    Args:
        sequence_parallel_size: Number P of processes that share a sequence. It must divide the number of processes and
            that of attention heads.
        **kwargs: Arguments of Lightning's ``DDPStrategy``.
    """


class FullyShardedUlyssesStrategy(_SequenceParallelStrategy, FullyShardedStrategy):
    """DeepSpeed Ulysses with FSDP2: groups of processes share each training sequence, and all share the weights.

    Args:
        sequence_parallel_size: As for `UlyssesStrategy`.
        **kwargs: Arguments of `FullyShardedStrategy`.
    """


def sequence_group(strategy: Strategy) -> SequenceGroup | None:
    """Return the processes that share sequences with this one, or None without sequence parallelism."""
    return strategy.sequence_group if isinstance(strategy, _SequenceParallelStrategy) else None


def sequence_parallel_size(trainer: Trainer) -> int:
    """Return how many processes share a sequence, after checking that they can."""
    if not isinstance(trainer.strategy, _SequenceParallelStrategy):
        return 1
    trainer.strategy.check_early()
    return trainer.strategy.sequence_parallel_size


def check_processes(size: int, processes: int) -> None:
    """Raise a ``ValueError`` if processes do not form groups of this size."""
    check_count("`sequence_parallel_size`", size)
    if processes % size:
        raise ValueError(
            f"`sequence_parallel_size` = {size} must divide the number of processes, {processes}: set"
            f" `trainer.devices` times `trainer.num_nodes` to a multiple of {size}."
        )
