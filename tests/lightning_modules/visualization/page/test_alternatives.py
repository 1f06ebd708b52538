from itertools import pairwise

import pytest
import torch

from lightning_modules.functional.windows import ShortContext, short_context_windows
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import long_and_short
from lightning_modules.visualization.page.alternatives import long_and_short_alternatives
from tests.conftest import tiny_model
from tests.support.packing import VOCABULARY, documents, packed


def best(model, tokens, count):
    """``[n, count]`` from the model's own full logits; entry t speaks of token t, and entry 0 is 0."""
    found = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1].double().log_softmax(-1).topk(count)
    return [torch.cat([part.new_zeros(1, count), part]) for part in (found.indices, found.values)]


def reference(model, batch, count, context_length, stride):
    """One document and one window at a time."""
    tokens, boundaries = batch["input_ids"][0], batch["document_boundaries"][0]
    parts = [best(model, tokens[start:stop], count) for start, stop in pairwise(boundaries)]
    long = [torch.cat(part) for part in zip(*parts, strict=True)]
    short = [part.clone() for part in long]
    for start, scored, stop in short_context_windows(boundaries, ShortContext(context_length, stride)):
        for target, source in zip(short, best(model, tokens[start:stop], count), strict=True):
            target[scored:stop] = source[scored - start :]
    return long, short


@pytest.mark.parametrize("windows_together", [True, False])
@pytest.mark.parametrize(("context_length", "stride"), [(6, 3), (4, 9)])
def test_both_contexts_match_full_logits_one_window_at_a_time(context_length, stride, windows_together, monkeypatch):
    if windows_together:  # as on an accelerator
        monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 5)
    model = tiny_model("llama", VOCABULARY)
    batch = packed(documents(30, 8, 17))
    with torch.no_grad():
        expected = reference(model, batch, 5, context_length, stride)
    found = long_and_short_alternatives(Backbone(model), batch, ShortContext(context_length, stride), count=5)
    for context, (token_ids, log_likelihood) in zip(found, expected, strict=True):
        assert torch.equal(context.token_ids[0], token_ids)
        torch.testing.assert_close(context.log_likelihood[0].double(), log_likelihood, atol=2e-5, rtol=1e-4)
    assert not torch.equal(found.long.token_ids, found.short.token_ids)


def test_they_agree_with_the_scores_of_the_tokens():
    backbone = Backbone(tiny_model("qwen2", VOCABULARY).train())
    batch, short_context = packed(documents(40)), ShortContext(8, 4)
    found = long_and_short_alternatives(backbone, batch, short_context, count=VOCABULARY)
    assert backbone.training
    for context, scores in zip(found, long_and_short(backbone.eval(), batch, short_context), strict=True):
        own = context.log_likelihood.where(context.token_ids == batch["input_ids"].unsqueeze(-1), 0.0).sum(-1)
        torch.testing.assert_close(own[:, 1:], scores[:, 1:])
