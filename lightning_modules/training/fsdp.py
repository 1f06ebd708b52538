"""FSDP2: weights, gradients and optimizer state sharded across processes."""

import contextlib
import functools
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from typing_extensions import override

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig, is_served
from lightning_modules.models.loading.dtypes import scoring_config
from lightning_modules.models.loading.load import load_backbone, load_config, load_frozen
from lightning_modules.models.progress import report_progress
from lightning_modules.models.served.scorer import connect
from lightning_modules.training.checkpoints.io import check_integrity
from lightning_modules.training.checkpoints.sharded import no_code, write_sharded

_REMEDY = "set `trainer.strategy` to `lightning_modules.training.fsdp.FullyShardedStrategy`"


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all devices of all nodes.

    Lightning's class uses tensor parallelism within a node unless its sizes are set.

    Args:
        save_distributed_checkpoint: Whether each process writes its shard of a checkpoint, which is then a folder.
            Otherwise the first process gathers all weights in main memory and writes one file, as without sharding.
        offload: Keep weights, gradients and optimizer state in host memory, and update the weights there. Each layer is
            copied to the GPU for its computation.
        **kwargs: ``process_group_backend`` and ``timeout`` of Lightning's ``ModelParallelStrategy``.
    """

    def __init__(self, save_distributed_checkpoint: bool = True, offload: bool = False, **kwargs: Any) -> None:
        self.offload = offload
        super().__init__(
            data_parallel_size="auto",  # all processes, see `setup_environment`
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a file, or a folder that appears once all processes have written their shards."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = functools.partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
        write_sharded(Path(self.broadcast(filepath)), save)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify and load a file or a folder, without running code in it unless ``weights_only`` is False."""
        path = Path(self.broadcast(checkpoint_path))
        check_integrity(path)
        weights_only = weights_only is not False
        with no_code() if weights_only else contextlib.nullcontext():
            return super().load_checkpoint(path, weights_only=weights_only)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.offload and self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # NCCL cannot sum up the norms of offloaded gradients
        super().setup_environment()


def data_parallel_mesh(trainer: Trainer) -> DeviceMesh | None:
    """Return the processes across which a trainer's strategy shards weights, or None if it does not shard them."""
    strategy = trainer.strategy
    check_strategy(strategy)
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"Tensor parallelism (of size {mesh['tensor_parallel'].size()} in {type(strategy).__name__}) is not"
            f" supported: {_REMEDY}."
        )
    if trainer.validate_loop.inference_mode:
        raise ValueError(
            f"{type(strategy).__name__} cannot gather weights in torch's inference mode: set"
            " `trainer.inference_mode: false`."
        )
    return mesh["data_parallel"]


def check_strategy(strategy: Any) -> None:
    """Raise a ``ValueError`` for DeepSpeed's strategy, or its name in a config, and for FSDP1; FSDP2 replaces both."""
    name = str(getattr(strategy, "class_path", strategy))
    is_deepspeed = name.rpartition(".")[2].lower().startswith("deepspeed")
    if isinstance(strategy, DeepSpeedStrategy | FSDPStrategy) or is_deepspeed:
        raise ValueError(
            "`trainer.strategy`: DeepSpeed ZeRO and FSDP1 are not supported. Use FSDP2: add"
            f" `-c configs/strategies/fsdp.yaml`, or {_REMEDY} and `trainer.inference_mode: false`."
        )


def saves_shards(strategy: Strategy) -> bool:
    """Return whether each process writes its shard of a checkpoint, which must then contain all weights."""
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def world_mesh(device: torch.device | str) -> DeviceMesh | None:
    """Return a mesh of all processes, independent of the trainer's strategy, or None for a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return init_device_mesh(torch.device(device).type, (dist.get_world_size(),))


def load_trainer_backbone(trainer: Trainer | None, config: ModelConfig) -> Backbone:
    """Load a model, sharded if the trainer's strategy shards weights, or connect to the server of one to evaluate."""
    if is_served(config.pretrained_model_name_or_path) and (trainer is None or trainer.state.fn != "fit"):
        return cast(Backbone, connect(config))  # evaluation only needs what both have
    if trainer is None:
        return load_backbone(config)
    if trainer.strategy.root_device.type == "mps":
        raise ValueError("Apple's GPUs do not support float64, which corpus sums need: set `trainer.accelerator: cpu`.")
    device = trainer.strategy.root_device
    precision = str(trainer.precision)
    mesh = data_parallel_mesh(trainer)
    if mesh is not None:
        offload = getattr(trainer.strategy, "offload", False)
        backbone = load_sharded_backbone(config, mesh, device=device, precision=precision, offload=offload)
    else:
        backbone = load_backbone(config, device=device, autocast=precision.endswith("-mixed"))
    if trainer.progress_bar_callback is not None:  # without bars, no layer of a pass reports to one
        report_progress(backbone.decoder)
    return backbone


def load_sharded_backbone(
    config: ModelConfig,
    mesh: DeviceMesh,
    *,
    device: torch.device | str,
    precision: str = "32-true",
    offload: bool = False,
) -> Backbone:
    """Load a model so that only the first process ever holds all of its weights, in main memory.

    The first process sends it layer by layer: on its device, each process holds its shards and one unsharded layer, and
    in the end embedding and head. All processes must make the same number of forward passes (`lockstep`). In
    ``bf16-mixed``, weights are gathered in bfloat16 and gradients summed in float32. With ``offload``, the shards and
    their gradients stay in host memory.
    """
    if config.quantization is not None:
        raise ValueError("Quantized weights cannot be sharded: remove `quantization`, or use DDP.")
    first = mesh.get_local_rank() == 0
    autocast = precision.endswith("-mixed")
    backbone = load_backbone(config, device=device, autocast=autocast, with_weights=first)
    unsent = {id(tensor) for tensor in (*backbone.parameters(), *backbone.buffers())}
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in backbone.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16-mixed" else None,
        reduce_dtype=torch.float32 if half or precision != "32-true" else None,
        cast_forward_inputs=False,  # a cast would round token weights that are stored with the sequences
    )
    policies: dict[str, Any] = {"mp_policy": policy}
    if offload:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.device(device).type != "cpu")
    for module in (*_find_layers(backbone), backbone):
        _broadcast_tensors(module, unsent, mesh, torch.device(device))
        # With resharding, the backward pass gathers head and embedding again before it recomputes logits, and outside
        # of a pass all parameters are always sharded.
        fully_shard(module, mesh=mesh, **policies, reshard_after_forward=True)
    register_fsdp_forward_method(backbone, "unsharded")
    backbone.is_sharded = True
    return backbone


def load_sharded_frozen(config: ModelConfig, device: torch.device | str) -> Backbone:
    """Load a model like `load_frozen`, sharded across all processes, of which there may be one."""
    mesh = world_mesh(device)
    if mesh is None:
        return load_frozen(config, device)
    config = scoring_config(config, load_config(config), device)
    backbone = load_sharded_backbone(config, mesh, device=device).eval().requires_grad_(False)
    check_scoring(backbone)
    report_progress(backbone.decoder)
    return backbone


def _find_layers(backbone: Backbone) -> list[nn.Module]:
    """Return the decoder layers: modules of the classes that transformers never splits across devices."""
    names = set(backbone.base_model._no_split_modules or ())
    layers = [module for module in backbone.decoder.modules() if type(module).__name__ in names]
    if not layers:  # all weights would be gathered at once
        raise ValueError(
            f"`{type(backbone.base_model).__name__}` does not define its layers (`_no_split_modules`), so it cannot be"
            " sharded: use DDP."
        )
    return layers


def _broadcast_tensors(module: nn.Module, unsent: set[int], mesh: DeviceMesh, device: torch.device) -> None:
    """Send the tensors of a module from the first process to all others, except those that were sent before.

    Parameters stay the same objects, with swapped contents, so that tied ones stay tied.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) in unsent]
    unsent.difference_update(map(id, tensors))
    dtypes: list[Any] = [[tensor.dtype for tensor in tensors]]
    dist.broadcast_object_list(dtypes, src=0, group=mesh.get_group())
    for tensor, dtype in zip(tensors, dtypes[0], strict=True):
        whole = torch.empty(tensor.shape, dtype=dtype, device=device)
        if mesh.get_local_rank() == 0:
            whole.copy_(tensor.detach())
        dist.broadcast(whole, src=0, group=mesh.get_group())
        whole = whole.detach()  # the communication may still reference the original, which could then not be swapped
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, whole)
