"""Random sampling of answers, with the arguments of lm-evaluation-harness (`gen_kwargs`); importable without torch."""

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the limit of new tokens, by precedence."""

_KNOWN = ("do_sample", "temperature", "top_k", "top_p", "min_p", "seed", "until", *MAX_TOKENS)


class Sampling(NamedTuple):
    """How tokens are drawn: greedily at temperature 0. `top_k` 0, `top_p` 1 and `min_p` 0 exclude no token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def parse_gen_kwargs(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse ``temperature=0.8,top_p=0.95`` or a mapping; raise a ``ValueError`` for an unknown or impossible value.

    The result replaces arguments of tasks, so it has the limit of tokens as ``max_gen_toks``, which takes precedence,
    and ``do_sample`` if a temperature is given: most tasks have ``do_sample: false``, under which it has no effect.
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = dict(yaml.safe_load(given))
    if isinstance(given, str):
        pairs = [part.partition("=") for part in re.split(r"[,\s]+(?=\w+=)", given.strip())]
        if not all(name and equals for name, equals, _ in pairs):
            raise ValueError(f"`gen_kwargs` must be such as 'temperature=0.8,top_p=0.95', got {given!r}.")
        given = {name: yaml.safe_load(value) for name, _, value in pairs}
    if unknown := [name for name in given or {} if name not in _KNOWN]:
        raise ValueError(f"`gen_kwargs` has unknown names: {', '.join(unknown)}. There are {', '.join(_KNOWN)}.")
    sampling, found = read_sampling(given or {}), dict(given or {})
    if limits := [limit for limit in (found.pop(name, None) for name in MAX_TOKENS) if limit is not None]:
        found["max_gen_toks"] = limits[0]
    return found | ({"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {})


def read_sampling(arguments: Mapping[str, Any]) -> Sampling:
    """Return how tokens are drawn; as in the harness, a temperature is enough, and `do_sample` alone has one of 1."""
    sampled = arguments.get("do_sample")
    given = {name: arguments[name] for name in Sampling._fields if arguments.get(name) is not None}
    found = Sampling(
        **({"temperature": 1.0} if sampled else {}) | given | ({"temperature": 0.0} if sampled is False else {})
    )
    found = found._replace(top_k=0) if found.top_k == -1 else found  # as vLLM spells it
    limits = {name: arguments[name] for name in MAX_TOKENS if arguments.get(name) is not None}
    ranges = {"temperature": (0, 100), "top_k": (0, None), "top_p": (1e-9, 1), "min_p": (0, 1), "seed": (0, None)}
    whole = {"top_k", "seed", *limits}
    for name, value in (found._asdict() | limits).items():
        low, high = ranges.get(name, (1, None))
        valid = isinstance(value, int if name in whole else int | float) and not isinstance(value, bool)
        if not valid or not low <= value <= (math.inf if high is None else high):
            limit = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise ValueError(
                f"`{name}` of a generation must be {'a whole number, ' * (name in whole)}{limit}, got {value!r}."
            )
    return found


class Sampler:
    """Draws the tokens of one continuation.

    They depend on the seed, the prompt and how often the same prompt was sampled before, but not on other prompts, so
    the number of processes and the groups in which prompts are decoded do not change an answer.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], repeat: int = 0) -> None:
        from transformers.generation import logits_process as warpers

        self.sampling = sampling
        digest = hashlib.sha256(repr((sampling.seed, repeat, list(prompt))).encode()).digest()
        self._random = random.Random(digest)
        # The classes and their order are those of `transformers.generate`.
        self._warpers = [
            warper(value)
            for warper, value, used in (
                (warpers.TemperatureLogitsWarper, float(sampling.temperature), sampling.temperature not in (0, 1)),
                (warpers.TopKLogitsWarper, sampling.top_k, sampling.top_k > 0),
                (warpers.TopPLogitsWarper, float(sampling.top_p), sampling.top_p < 1),
                (warpers.MinPLogitsWarper, float(sampling.min_p), sampling.min_p > 0),
            )
            if used and sampling.temperature > 0
        ]

    def __call__(self, logits: "Tensor") -> int:
        """Return the next token, given its ``[V]`` logits."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        scores = logits[None].float()
        for warper in self._warpers:
            scores = warper(None, scores)
        # The inverse of the cumulative distribution, at a number from 0 to 1 that every device draws alike.
        cumulative = scores[0].double().softmax(-1).cumsum(-1)
        below = cumulative < self._random.random() * float(cumulative[-1])
        return int(below.sum())


def make_samplers(sampling: Sequence[Sampling], prompts: Sequence[Sequence[int]]) -> list[Sampler] | None:
    """Return a sampler for each prompt; None if all of them are greedy."""
    if not any(each.temperature for each in sampling):
        return None
    seen: Counter[tuple[int, ...]] = Counter()
    samplers = []
    for each, prompt in zip(sampling, map(tuple, prompts), strict=True):
        samplers.append(Sampler(each, prompt, seen[prompt]))
        seen[prompt] += 1
    return samplers
