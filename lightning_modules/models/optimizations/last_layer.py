"""Save the work of the last decoder layer on tokens whose output nobody reads."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def last_layer_reads_from(decoder: nn.Module, start: int) -> Iterator[None]:
    """Within, the last layer works out queries, attention output and MLP only from position ``start`` on.

    Keys and values need every token, the rest of the last layer only those that are read. What the layer gives for
    earlier positions has no meaning. A decoder whose last layer is not of the common build (``self_attn.q_proj``,
    ``self_attn.o_proj``, ``mlp``) does all of its work as ever.

    Args:
        decoder: A Hugging Face decoder, with or without adapters inside.
        start: First position of the ``[B, T, D]`` hidden states that is read.
    """
    handles = []
    for part in _parts(decoder) if start > 0 else ():
        handles.append(part.register_forward_pre_hook(lambda _, inputs: (_cut(inputs[0], start), *inputs[1:])))
        handles.append(part.register_forward_hook(lambda _, __, output: _put_back(output, start)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(decoder: nn.Module) -> list[nn.Module]:
    """The modules of the last layer that work on each token by itself and are not needed for keys and values."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        return []
    attention, mlp = (getattr(layers[-1], name, None) for name in ("self_attn", "mlp"))
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), mlp]
    return [part for part in parts if isinstance(part, nn.Module)] if None not in parts else []


def _cut(hidden_states: Tensor, start: int) -> Tensor:
    return hidden_states[:, start:].contiguous()  # experts take all tokens of a batch for one list


def _put_back(output: Any, start: int) -> Any:
    """Zeros for the positions left out."""
    if not isinstance(output, Tensor):  # an MLP of experts may give its router's logits as well
        return (_put_back(output[0], start), *output[1:])
    whole = output.new_zeros(output.shape[0], start + output.shape[1], *output.shape[2:])
    whole[:, start:] = output
    return whole
