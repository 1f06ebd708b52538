"""Sampled tokens have the probabilities of transformers, and do not depend on the other prompts."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.sampling import Sampler, Sampling, make_samplers, parse_gen_kwargs
from lightning_modules.tasks.sampling import read_sampling as read
from tests.conftest import tiny_model

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0]


def reference(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities in float64: temperature, then the k likeliest, then the fewest that have probability p."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(LOGITS)}
    order = sorted(weights, key=weights.get, reverse=True)[: top_k or None]
    total, reached, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if reached < top_p:
            kept.append(token)
        reached += weights[token] / total
    kept = [token for token in kept if weights[token] >= min_p * weights[order[0]]]
    return {token: weights[token] / sum(weights[other] for other in kept) for token in kept}


@pytest.mark.limit(3)
@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.8, "top_k": 4}, {"min_p": 0.3}])
def test_token_frequencies_match_the_formula(settings):
    sampler, logits, draws = Sampler(Sampling(**{"temperature": 1.0} | settings), [1, 2]), torch.tensor(LOGITS), 2000
    counts, expected = Counter(sampler(logits) for _ in range(draws)), reference(**settings)
    assert set(counts) == set(expected)
    for token, probability in expected.items():
        assert counts[token] / draws == pytest.approx(probability, abs=4 * math.sqrt(0.25 / draws))


@pytest.mark.parametrize("number", [0.0, 0.3, 0.5, 0.9, 1 - 2**-53])
def test_draws_invert_the_cumulative_distribution_in_float64(number):
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(Sampling(temperature=1.0), [1])
    sampler._random = SimpleNamespace(random=lambda: number)
    probabilities = np.exp(logits.double().numpy())
    cumulative = np.cumsum(probabilities / probabilities.sum())
    assert sampler(logits) == min(np.searchsorted(cumulative, number), len(logits) - 1)


def test_a_continuation_does_not_depend_on_its_group():
    backbone = Backbone(tiny_model("llama", 50))
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [6]]

    def ask(chosen):
        samplers = make_samplers([Sampling(temperature=1.0, seed=3)] * len(chosen), chosen)
        return generate(backbone, chosen, 6, samplers=samplers)

    together = ask(prompts)
    assert together[1] != together[3]  # the same prompt, sampled again
    assert [ask([prompt])[0] for prompt in prompts[:3]] == together[:3]
    assert ask(prompts[::-1])[::-1][0] == together[0]
    assert make_samplers([Sampling()] * 4, prompts) is None
    greedy, _ = make_samplers([Sampling(), Sampling(temperature=1.0)], prompts[:2])
    assert {greedy(torch.tensor(LOGITS)) for _ in range(20)} == {0}


def test_gen_kwargs_are_parsed_like_the_harness():
    assert parse_gen_kwargs(None) == {}
    assert parse_gen_kwargs({"temperature": 0.8}) == {"temperature": 0.8, "do_sample": True}
    assert parse_gen_kwargs("do_sample=true") == {"do_sample": True, "temperature": 1.0}
    assert parse_gen_kwargs(" temperature=0,max_gen_toks=3 ") == {"temperature": 0, "max_gen_toks": 3}
    given = parse_gen_kwargs("temperature=0.8,top_p=0.95 top_k=0,until=['.', \",\"],max_gen_toks=64")
    expected = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "until": [".", ","], "max_gen_toks": 64}
    assert given == expected | {"do_sample": True}
    assert read(given) == Sampling(0.8, top_p=0.95)
    assert read({"do_sample": True}).temperature == 1.0
    assert read({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert read({"until": ["x"]}).temperature == 0.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("temperature", "temperature"),
        ("heat=1", "heat"),
        ("temperature=-1", "temperature"),
        ("temperature=.nan", "temperature"),
        ("top_p=0", "top_p"),
        ("min_p=1.1", "min_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
    ],
)
def test_invalid_arguments_are_refused(given, name):
    with pytest.raises(ValueError, match=f"`.*{name}"):
        parse_gen_kwargs(given)
