"""Floating-point operations of an exact LongPPL."""

from lightning_modules.commands.plan.flops import Flops, forward_flops, short_pass_flops
from lightning_modules.commands.plan.shapes import ModelShape


def scoring_flops(
    evaluator: ModelShape,
    model: ModelShape,
    tokens: int,
    context_length: int,
    stride: int,
    *,
    shared_pass: bool = False,
) -> Flops:
    """Count LongPPL of one document: long and short contexts under the evaluator, long context under the model.

    With ``shared_pass`` the model is the evaluator, and its long context is computed once.
    """
    total = forward_flops(evaluator, tokens, tokens - 1)
    total += short_pass_flops(evaluator, tokens, context_length, stride)
    return total if shared_pass else total + forward_flops(model, tokens, tokens - 1)
