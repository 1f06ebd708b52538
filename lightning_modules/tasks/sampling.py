"""Random sampling of answers, with the arguments of lm-evaluation-harness (`gen_kwargs`); importable without torch."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt, restricted_number_type

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_modules.models.backbone import Backbone

_TYPES: dict[str, Any] = {
    "temperature": restricted_number_type(None, float, [(">=", 0), ("<=", 100)]),
    "top_k": NonNegativeInt,
    "top_p": restricted_number_type(None, float, [(">", 0), ("<=", 1)]),
    "min_p": ClosedUnitInterval,
    "seed": NonNegativeInt,
    "max_gen_toks": PositiveInt,
    **dict.fromkeys(("do_sample", "until"), lambda value: value),
}


class Sampling(NamedTuple):
    """How tokens are drawn: greedily at temperature 0. `top_k` 0, `top_p` 1 and `min_p` 0 exclude no token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def parse_gen_kwargs(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse ``temperature=0.8,top_p=0.95`` or a mapping; raise a ``ValueError`` for an unknown or impossible value.

    The result replaces arguments of tasks, so it has ``do_sample`` if a temperature is given: most tasks have
    ``do_sample: false``, under which a temperature has no effect.
    """
    if isinstance(given, str):
        pairs = (part.partition("=") for part in re.split(r"[,\s]+(?=\w+=)", given.strip()))
        given = {name: yaml.safe_load(value) for name, _, value in pairs}
    found = {name: _convert(name, value) for name, value in (given or {}).items()}
    temperature = read_sampling(found).temperature
    return found | ({"do_sample": True, "temperature": temperature} if temperature else {})


def read_sampling(arguments: Mapping[str, Any]) -> Sampling:
    """Return how tokens are drawn; as in the harness, a temperature is enough, and `do_sample` alone has one of 1."""
    given = {name: _convert(name, arguments[name]) for name in Sampling._fields if arguments.get(name) is not None}
    sampled = arguments.get("do_sample")
    if sampled:
        given.setdefault("temperature", 1.0)
    elif sampled is False:
        given["temperature"] = 0.0
    return Sampling(**given)


def _convert(name: str, value: Any) -> Any:
    if name not in _TYPES:
        raise ValueError(f"`gen_kwargs` has the unknown name '{name}'; known are {', '.join(_TYPES)}.")
    try:
        return _TYPES[name](value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` of a generation: {error}.") from None


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
        self._warpers: list[Any] = [warpers.TemperatureLogitsWarper(float(sampling.temperature or 1))]
        if sampling.top_k > 0:
            self._warpers.append(warpers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(warpers.TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0:
            self._warpers.append(warpers.MinPLogitsWarper(float(sampling.min_p)))

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


def find_end_tokens(backbone: "Backbone") -> list[int]:
    """Return the tokens of the generation config that end a continuation and are not part of it."""
    ends = backbone.base_model.generation_config.eos_token_id if backbone.base_model.can_generate() else None
    ends = backbone.base_model.config.get_text_config(decoder=True).eos_token_id if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
