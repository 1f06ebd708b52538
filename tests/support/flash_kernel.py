"""A FlashAttention-3 kernel of the hub for the CPU: the signatures of the real one, computed by torch's attention.

The names and signatures are those of `kernels-community/flash-attn3`, version 1.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_modules.models.loading.load import FLASH_3_KERNEL

NAMESPACE = "_flash_attn3_cuda_9aa33c0"


def attend(q, k, v, scale, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)


def attend_all(q, k, v, cu_seqlens, scale, causal):
    if cu_seqlens is None:
        return attend(q, k, v, scale, causal)
    spans = list(pairwise(cu_seqlens.tolist()))
    documents = [attend(*(x[None, start:stop] for x in (q, k, v)), scale, causal)[0] for start, stop in spans]
    return torch.cat([*documents, q[spans[-1][1] :]])


@torch.library.custom_op(f"{NAMESPACE}::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    return attend_all(q, k, v, cu_seqlens_q, softmax_scale, causal).contiguous(), q.new_empty(0)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, causal):
        ctx.save_for_backward(q, k, v)
        ctx.arguments = (cu_seqlens, scale, causal)
        return _flash_attn_forward(q, k, v, cu_seqlens, scale, causal)[0]

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            gradients = torch.autograd.grad(attend_all(*inputs, *ctx.arguments), inputs, grad)
        return *gradients, None, None, None


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert q.dtype in (torch.bfloat16, torch.float16), "FlashAttention only supports fp16 and bf16"
    return FlashAttnFunc.apply(q, k, v, None, softmax_scale, causal)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    assert q.dtype in (torch.bfloat16, torch.float16), "FlashAttention only supports fp16 and bf16"
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return FlashAttnFunc.apply(q, k, v, cu_seqlens_q, softmax_scale, causal)


def install(monkeypatch, **functions):
    """Let transformers load this kernel for any name of the hub."""
    kernel = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func} | functions
    kernel |= {"flash_attn_with_kvcache": flash_attn_func}
    for module in ("integrations.hub_kernels", "modeling_utils"):
        monkeypatch.setattr(f"transformers.{module}.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("lightning_modules.models.loading.load.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: SimpleNamespace(**kernel))
    monkeypatch.setattr("transformers.modeling_flash_attention_utils._loaded_implementation", None)
    return FLASH_3_KERNEL
