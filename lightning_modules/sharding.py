"""FSDP2 and DeepSpeed: a backbone whose weights, gradients and optimizer state are divided among processes."""

import contextlib
import functools
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from typing_extensions import override

from lightning_modules import zero
from lightning_modules.backbone import Backbone
from lightning_modules.checkpoint_folder import no_code, write_together
from lightning_modules.checkpoint_io import check_together
from lightning_modules.loading import load_backbone
from lightning_modules.zero_checkpoints import check_zero_checkpoint

_REMEDY = "set `trainer.strategy` to `lightning_modules.sharding.FullyShardedStrategy`"


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all devices of all nodes.

    Lightning's own class divides single tensors among the devices of a node unless it is told otherwise in numbers.

    Args:
        save_distributed_checkpoint: Whether each process writes its part of a checkpoint, which is a folder then. If
            not, the first process gathers everything in its main memory and writes one file, as without sharding.
        process_group_backend: As torch names it; by default the one for the device.
        timeout: How long a process waits for the others.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """A file, or a folder that appears when all processes have written their parts.

        Raises:
            CheckpointError: In all processes, if one cannot write. Earlier checkpoints are as they were.
        """
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = functools.partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
        write_together(Path(self.broadcast(filepath)), save)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """A file or a folder, once it is known to be what was written, without running any code that it may hold.

        Raises:
            ValueError: If it is missing, torn or damaged.
        """
        path = Path(self.broadcast(checkpoint_path))
        check_together(path)
        safely = weights_only is not False
        with no_code() if safely else contextlib.nullcontext():
            return super().load_checkpoint(path, weights_only=safely)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def data_parallel_mesh(trainer: Trainer) -> DeviceMesh | None:
    """The processes among which a trainer's strategy divides the weights; None if each holds all of them.

    Raises:
        ValueError: If the strategy is FSDP1, divides single tensors, or evaluates in inference mode, in which weights
            cannot be gathered and trained afterwards.
    """
    strategy = trainer.strategy
    if _is_stage_3(strategy):
        _check_inference(trainer)
        return init_device_mesh(strategy.root_device.type, (trainer.world_size,))
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(f"FSDP1 (`trainer.strategy: fsdp`) is not supported: {_REMEDY}, which is FSDP2.")
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"Tensor parallelism is not supported, and {type(strategy).__name__} divides tensors among"
            f" {mesh['tensor_parallel'].size()} devices: {_REMEDY}."
        )
    _check_inference(trainer)
    return mesh["data_parallel"]


def prepare_deepspeed(trainer: Trainer, dtype: str) -> None:
    """Refuse what DeepSpeed would do wrong, or notice only after the model is loaded, and in one process alone.

    Args:
        trainer: With any strategy.
        dtype: Of the weights, as the user wants them.

    Raises:
        ValueError: If DeepSpeed divides nothing, scales a loss in float16 or is to compute in float64, or the
            checkpoint to go on with would make it run code.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DeepSpeedStrategy):
        return
    config = strategy.config or {}
    if config.get("zero_optimization", {}).get("stage", 0) not in (1, 2, 3):
        raise ValueError("DeepSpeed without a stage of ZeRO (1, 2 or 3) divides nothing: set `trainer.strategy: ddp`.")
    if str(trainer.precision).startswith("16"):
        raise ValueError(
            f"`trainer.precision: {trainer.precision}` is not supported with DeepSpeed, whose loss scale of its own"
            " would not go with a mean over all tokens of a step: set `bf16-mixed`."
        )
    if dtype == "float64":
        raise ValueError("DeepSpeed computes in float32 or bfloat16: set `model.dtype: float32`.")
    if config.get("data_types", {}).get("grad_accum_dtype") is not None:
        raise ValueError(
            "DeepSpeed's `data_types.grad_accum_dtype` brings in optimizers that take no divisor for gradients, so that"
            " a step would not be a mean over its tokens: leave it out."
        )
    if trainer.ckpt_path is not None and not (_is_stage_3(strategy) and strategy.load_full_weights):
        check_zero_checkpoint(trainer.ckpt_path)
    # For its log of throughput alone; or Lightning asks for training data to find it, also where there is no training.
    config.setdefault("train_micro_batch_size_per_gpu", 1)


def _check_inference(trainer: Trainer) -> None:
    if trainer.validate_loop.inference_mode:
        raise ValueError(
            f"{type(trainer.strategy).__name__} cannot gather weights in torch's inference mode: set"
            " `trainer.inference_mode: false`."
        )


def ends_accumulation(strategy: Strategy) -> bool:
    """Whether the optimizer steps now: DeepSpeed is asked to after each micro-batch, and does so after the last one."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return True
    return strategy.deepspeed_engine.is_gradient_accumulation_boundary()


def divide_gradients(strategy: Strategy, parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
    """Divide gradients between backward pass and step, before they are clipped.

    DeepSpeed keeps them to itself, and divides them in its step by the scale that it takes the loss to have had.
    `start_backward` says that it had none.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        engine = strategy.deepspeed_engine
        # Lightning has divided the loss by the batches of a step, and DeepSpeed has done it once more.
        engine.optimizer.loss_scale = divisor.item() / engine.gradient_accumulation_steps()
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def start_backward(strategy: Strategy) -> None:
    """The loss is not scaled by DeepSpeed, whatever `divide_gradients` said."""
    if isinstance(strategy, DeepSpeedStrategy):
        strategy.deepspeed_engine.optimizer.loss_scale = 1.0


def saves_parts(strategy: Strategy) -> bool:
    """Whether each process writes its part of a checkpoint. Reading them back needs every weight to be there."""
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def world_mesh(device: torch.device | str) -> DeviceMesh | None:
    """All processes, for a model that is divided whatever the trainer's strategy does; None for a single one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return init_device_mesh(torch.device(device).type, (dist.get_world_size(),))


def load_trainer_backbone(trainer: Trainer, **loading: Any) -> Backbone:
    """Load a model as a trainer's strategy wants it: whole, or divided among processes.

    Args:
        trainer: Its strategy has been set up.
        **loading: Arguments of `load_backbone`.

    Raises:
        ValueError: As `data_parallel_mesh` and `load_sharded_backbone` do.
    """
    strategy, precision = trainer.strategy, str(trainer.precision)
    device = strategy.root_device
    with zero.whole_modules() if _is_stage_3(strategy) else contextlib.nullcontext():
        if (mesh := data_parallel_mesh(trainer)) is not None:
            return load_sharded_backbone(mesh, device=device, precision=precision, strategy=strategy, **loading)
        backbone = load_backbone(**loading, device=device, autocast=precision.endswith("-mixed"))
    if isinstance(strategy, DeepSpeedStrategy):  # which wants all of one type, and says so in the first process only
        for parameter in backbone.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(_parameter_dtype(precision))
    return backbone


def _is_stage_3(strategy: Strategy) -> bool:
    return isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3


def load_sharded_backbone(
    mesh: DeviceMesh,
    *,
    device: torch.device | str,
    precision: str = "32-true",
    strategy: Strategy | None = None,
    **loading: Any,
) -> Backbone:
    """Load a model that no process but the first ever holds as a whole.

    The first one loads it into main memory and sends it piece by piece; on the device a process holds its part and one
    decoder layer at a time, and embedding and head in the end.

    Args:
        mesh: The processes, in one dimension.
        device: Where the model will run.
        precision: Of the trainer: in ``bf16-mixed`` weights are gathered in bfloat16, and gradients summed in float32.
        strategy: Of the trainer, if that is what divides the model; DeepSpeed's stage 3 does it in its own way.
        **loading: Arguments of `load_backbone`.

    Returns:
        A backbone that is on the device. All processes must make the same number of passes through it: `forward`
        and `short_log_likelihood` see to that for batches of any length, as long as there are equally many.

    Raises:
        ValueError: As `load_backbone` does; if the weights are to be quantised, or the model does not say which of its
            parts are its layers.
    """
    if loading.get("quantization") is not None:
        raise ValueError("Quantised weights cannot be divided among processes: leave `quantization` out, or use DDP.")
    engine = strategy if isinstance(strategy, DeepSpeedStrategy) else None
    autocast = precision.endswith("-mixed")
    first = mesh.get_local_rank() == 0
    backbone = load_backbone(**loading, device=device, autocast=autocast, with_weights=first)
    dtypes = _dtypes(backbone, mesh, None if engine is None else _parameter_dtype(precision))
    policy = _mixed_precision(backbone, precision)
    for module in (*_layers(backbone), backbone):
        _send(module, dtypes, mesh, torch.device(device))
        if engine is not None:
            zero.divide(module, engine.config or {}, engine.remote_device)
        else:
            # Resharded: the loss has its gradients already, so nothing between forward and backward pass reads head
            # and embedding; and outside of a pass all parameters are parts, whatever came before.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if engine is not None:
        backbone.gather_head()
    else:
        register_fsdp_forward_method(backbone, "within")
    backbone.in_step = True
    return backbone


def _mixed_precision(backbone: Backbone, precision: str) -> MixedPrecisionPolicy:
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in backbone.parameters())
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16-mixed" else None,
        reduce_dtype=torch.float32 if half or precision != "32-true" else None,
        cast_forward_inputs=False,  # or the short log-likelihoods of a `Weighing` would be rounded
    )


def _layers(backbone: Backbone) -> list[nn.Module]:
    """The decoder layers, by the classes that transformers never splits among devices."""
    names = set(backbone.base_model._no_split_modules or ())
    layers = [module for module in backbone.decoder.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"`{type(backbone.base_model).__name__}` does not say what its layers are (`_no_split_modules`), so that it"
            " cannot be divided among processes: use DDP."
        )
    return layers


def _parameter_dtype(precision: str) -> torch.dtype:
    """What DeepSpeed computes with; the float32 weights beside those of half precision are its optimizer's."""
    return {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}[precision.partition("-")[0]]


def _dtypes(backbone: Backbone, mesh: DeviceMesh, wanted: torch.dtype | None) -> dict[int, torch.dtype]:
    """Type of each tensor, by its identity: as the first process has loaded it, or as parameters are wanted."""
    tensors = [*backbone.named_parameters(), *backbone.named_buffers()]
    sent: list[Any] = [[(name, tensor.dtype) for name, tensor in tensors]]
    dist.broadcast_object_list(sent, src=0, group=mesh.get_group())
    assert [name for name, _ in sent[0]] == [name for name, _ in tensors], "both are built from the same settings"
    dtypes = {id(tensor): dtype for (_, tensor), (_, dtype) in zip(tensors, sent[0], strict=True)}
    return dtypes if wanted is None else {**dtypes, **{id(part): wanted for part in backbone.parameters()}}


def _send(module: nn.Module, dtypes: dict[int, torch.dtype], mesh: DeviceMesh, device: torch.device) -> None:
    """Give all processes the tensors of a module that the first one has, except those sent before.

    Tied parameters stay one: what they hold is swapped, not they themselves.
    """
    for parameter in module.parameters():
        if (dtype := dtypes.pop(id(parameter), None)) is not None:
            whole = nn.Parameter(_received(parameter, dtype, mesh, device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, whole)
    for buffer in module.buffers():
        if (dtype := dtypes.pop(id(buffer), None)) is not None:
            torch.utils.swap_tensors(buffer, _received(buffer, dtype, mesh, device))


def _received(tensor: Tensor, dtype: torch.dtype, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A copy on the device of what the first process holds."""
    first = mesh.get_local_rank() == 0
    whole = torch.empty(tensor.shape, dtype=dtype, device=device)
    if first:
        whole.copy_(tensor.detach())
    dist.broadcast(whole, src=0, group=mesh.get_group())
    return whole.detach()  # a tensor of its own: the communication may still hold on to the other, which is not swapped
