"""Run a CUDA path without a GPU: tensors on ``cuda`` have shapes and dtypes but no memory, and everything is recorded.

Operators that touch no such tensor run as usual, so values in main memory are real. The backward pass cannot run:
autograd asks for streams of a real device.
"""

import contextlib
import ctypes
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import modeling_flash_attention_utils
from transformers.utils import import_utils

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.bmm.default}
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""Array in torch of the guard of each kind of device: 0 is the CPU, 1 CUDA. A build for CPUs has none for CUDA."""


@dataclass
class Recorded:
    """What happened on the device; the keys of `waits` and `copies` begin with the file and line."""

    waits: Counter = field(default_factory=Counter)  # places where a value had to come back from the device
    copies: Counter = field(default_factory=Counter)  # copies to the device that wait for it
    masks: Counter = field(default_factory=Counter)  # shapes of tensors with an entry for each pair of tokens
    attention: Counter = field(default_factory=Counter)  # (kernel, shape of the queries, key heads, dtype, causal)
    products: Counter = field(default_factory=Counter)  # (rows, columns, dtype of operands, dtype of result)

    def clear(self):
        for counter in vars(self).values():
            counter.clear()


@contextlib.contextmanager
def fake_cuda(pair_of=64):
    """Yield a `Recorded`; a tensor whose last two sizes are equal and at least ``pair_of`` counts as a mask."""
    recorded = Recorded()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_device_guard())
        # transformers skips checks that read values for fake tensors, but not on a GPU.
        stack.enter_context(mock.patch.object(import_utils, "is_fake_tensor", return_value=False))
        # Without a GPU, autocast would turn itself off.
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Operators(recorded, pair_of))
        stack.enter_context(_Functions(recorded))
        yield recorded


@contextlib.contextmanager
def _device_guard():
    """Let tensors on ``cuda`` use the guard of the CPU, which does nothing, where the build of torch has none."""
    if torch.cuda.is_available():
        yield
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 2).in_dll(library, REGISTRY)
    except (OSError, ValueError) as error:
        pytest.skip(f"this build of torch hides its device guards: {error}")
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


def _place():
    """Return file and line of the innermost code outside of torch and this file."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    frame = [frame for frame in frames if frame.filename != __file__][-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def _is_gpu(value):
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _is_mask(index):
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class _Operators(TorchDispatchMode):
    def __init__(self, recorded, pair_of):
        super().__init__()
        self.recorded, self.pair_of = recorded, pair_of

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        gpu = [value for value in tree_leaves((args, kwargs)) if _is_gpu(value)]
        if not gpu and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            with _disable_current_modes():
                return function(*args, **kwargs)
        if (waited := self.wait(function, args, kwargs)) is not None:
            return waited
        result = function(*args, **kwargs)
        self.record(function, args, kwargs, result)
        return result

    def wait(self, function, args, kwargs):
        """Record an operator that reads values, and return made-up ones: 0, False, or half of the elements."""
        half = args[0].numel() // 2 if args and isinstance(args[0], Tensor) else 0
        answer = None
        if function is aten._local_scalar_dense.default:
            answer = False if args[0].dtype == torch.bool else args[0].dtype.is_floating_point * 0.0
        elif function is aten.nonzero.default:
            answer = torch.empty(half, args[0].dim(), dtype=torch.int64, device="cuda")
        elif function is aten.masked_select.default or (function is aten.index.Tensor and any(map(_is_mask, args[1]))):
            answer = torch.empty(half, dtype=args[0].dtype, device="cuda")
        elif function is aten._to_copy.default and _is_gpu(args[0]) and "cpu" in str(kwargs.get("device")):
            with _disable_current_modes():
                answer = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
                if answer.dtype == torch.bool:  # a filter should leave something
                    answer[..., 1:] = True
        if answer is not None:
            self.recorded.waits[_place()] += 1
        return answer

    def record(self, function, args, kwargs, result):
        if function is aten._to_copy.default and not _is_gpu(args[0]) and not kwargs.get("non_blocking"):
            self.recorded.copies[_place()] += 1
        if function is aten.copy_.default and not _is_gpu(args[1]) and args[1].dim() and not (*args, False)[2]:
            self.recorded.copies[_place()] += 1
        indices = args[1] if function in (aten.index.Tensor, aten.index_put_.default) else ()
        if any(index is not None and not _is_gpu(index) for index in indices):
            self.recorded.copies[_place()] += 1
        if function is aten.index_put_.default and args[2].numel() > 1 and any(map(_is_mask, args[1])):
            self.recorded.waits[_place()] += 1
        if function in PRODUCTS:
            left, right = args[-2 if function is aten.addmm.default else 0 :][:2]
            self.recorded.products[left.shape[-2], right.shape[-1], left.dtype, result.dtype] += 1
        if function.name().startswith("torch_attn::_varlen_attn"):
            query, key = args[:2]
            limits = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == 2]
            limited = f" in a window of {limits[0][0] + 1}" if limits and limits[0][0] >= 0 else ""
            self.recorded.attention[f"varlen{limited}", tuple(query.shape), key.shape[1], query.dtype, args[7]] += 1
        shape = result.shape[-2:] if isinstance(result, Tensor) else ()
        if len(shape) == 2 and shape[0] == shape[1] >= self.pair_of and result.dim() > 2:
            self.recorded.masks[tuple(result.shape)] += 1


class _Functions(TorchFunctionMode):
    def __init__(self, recorded):
        super().__init__()
        self.recorded = recorded

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            return args[0]
        if function is not F.scaled_dot_product_attention or not _is_gpu(args[0]):
            return function(*args, **kwargs)
        query, key = args[:2]
        mask = kwargs.get("attn_mask")
        assert query.shape[1] == key.shape[1] or kwargs.get("enable_gqa"), "repeated keys take memory"
        query = query.to(autocast_dtype(query))  # autocast casts the arguments
        kernel = "sdpa" if mask is None else f"sdpa with mask {tuple(mask.shape)}"
        self.recorded.attention[kernel, tuple(query.shape), key.shape[1], query.dtype, kwargs.get("is_causal")] += 1
        return query.clone()


def autocast_dtype(tensor):
    """Return the dtype in which autocast runs the kernels of matrix products and attention."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


@contextlib.contextmanager
def flash_attention_2(model, recorded):
    """Let a model use flash-attn 2.8, with functions of its signatures that record the call."""

    def record(kernel, query, key, causal):
        recorded.attention[kernel, tuple(query.shape), key.shape[-2], query.dtype, causal] += 1
        assert query.dtype in (torch.bfloat16, torch.float16), "flash-attn supports half precision only"
        return query.clone()

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        return record("flash", q, k, causal)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        if isinstance(max_seqlen_q, Tensor):
            recorded.waits["flash_attn_varlen_func max_seqlen_q"] += 1
        assert cu_seqlens_q.device == q.device
        assert cu_seqlens_q.dtype == torch.int32
        limited = "" if window_size == (-1, -1) else f" in a window of {window_size[0] + 1}"
        return record(f"flash varlen{limited}", q, k, causal)

    functions = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    utilities = modeling_flash_attention_utils
    loaded = SimpleNamespace(**{name: getattr(utilities, name) for name in vars(utilities) if name.startswith("_")})
    with mock.patch.object(utilities, "_lazy_imports", return_value=functions):
        model.config._attn_implementation = "flash_attention_2"
        utilities._loaded_implementation = None
        try:
            yield
        finally:
            for name, value in vars(loaded).items():
                setattr(utilities, name, value)
