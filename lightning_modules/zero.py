"""DeepSpeed's ZeRO stage 3, in which a parameter is empty except while a module that uses it computes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class GatheringModule(nn.Module):
    """Calls a function that uses parameters of other modules, which `share_parameters` names.

    DeepSpeed gathers weights before a module's forward and backward pass, and lets go of them afterwards: who uses a
    weight without calling its module needs a module to be called in.
    """

    def forward(self, *inputs: Tensor, function: Callable[..., Any]) -> Any:
        """What the function gives for the inputs. Those of its results that are tensors may need gradients."""
        return function(*inputs)


def share_parameters(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Have parameters of other modules gathered whenever this one is called."""
    import deepspeed

    for parameter in parameters:
        deepspeed.zero.register_external_parameter(module, parameter)


def is_divided(parameter: Tensor) -> bool:
    """Whether DeepSpeed has divided a parameter among processes."""
    return hasattr(parameter, "ds_id")  # as DeepSpeed itself asks


def whole_shape(parameter: Tensor) -> torch.Size:
    """Of a parameter, also while it is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_gathering_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is one by which DeepSpeed gathers weights, and changes nothing that is computed."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters as wholes, for reading, where no module is called. All processes must ask for the same ones."""
    divided = [parameter for parameter in parameters if is_divided(parameter)]
    if not divided:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(divided):
        yield


def divide(module: nn.Module, config: dict[str, Any], remote_device: str | None) -> None:
    """Leave each process its part of the parameters of a module, of which the first process knows the values.

    Args:
        module: Its parameters have memory in every process.
        config: Of DeepSpeed.
        remote_device: Where the parts stay, as `deepspeed.zero.Init` names it; None for the device.
    """
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config, remote_device=remote_device)


@contextlib.contextmanager
def whole_modules() -> Iterator[None]:
    """Modules are made as ever, also where Lightning has asked DeepSpeed to divide each as soon as it is made."""
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()
