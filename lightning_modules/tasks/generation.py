"""Generation for many prompts, with a key-value cache: greedy, or sampled.

Prefill runs one prompt at a time, without padding or a mask. Then the caches of a group are padded on the left to one
length, and the group decodes together, one token per pass. A trial run detects models that do not support this.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lightning_modules.models.attention import boundaries_only
from lightning_modules.models.backbone import Backbone, CacheUse
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, last_layer_reads_from, no_autocast_cache, uncompiled
from lightning_modules.tasks.sampling import Sampler
from lightning_modules.tasks.teacher_forcing import padded_rows

log = logging.getLogger(__name__)

CACHE_BYTES = 2**30  # memory for the caches of a group on a CPU
MAX_GROUP = 64  # maximum rows of a group, whose logits exist at the same time
WINDOWED_CHUNK = 2048  # prefill chunk of models with sliding windows, whose mask has as many rows


def generate(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    done: Callable[[dict[int, list[int]]], None] | None = None,
    stopped: Callable[[int, list[int]], bool] | None = None,
    samplers: Sequence[Sampler] | None = None,
) -> list[list[int]]:
    """Continue each prompt greedily, as ``transformers.generate(do_sample=False)`` does, or with samplers.

    The model runs in eval mode, without gradients or global random numbers. If weights are sharded, all processes must
    call this, each with any number of prompts.

    Args:
        backbone: The model.
        prompts: Token ids of each prompt.
        max_new_tokens: Limit of new tokens, for all prompts or for each.
        done: Called with the continuations of each finished group, by index of the prompt.
        stopped: Called after each token with the index of the prompt and its new tokens; returns whether to stop.
        samplers: For each prompt what draws its tokens.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if not all(prompts):
        raise ValueError("A prompt is empty: it must have at least one token.")
    backbone.check_length(max((len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)), default=0))
    results: list[list[int]] = [[] for _ in prompts]
    # Rows of a group decode until the last one is done, so group prompts with similar limits and lengths.
    order = sorted(range(len(prompts)), key=lambda index: (limits[index], len(prompts[index])), reverse=True)
    with torch.no_grad(), no_autocast_cache(), eval_mode(backbone):
        decoder = _Decoder(backbone, stopped, samplers)
        with lockstep(backbone) as run:
            rows = (_Row(index, prompts[index], limits[index]) for index in order)
            for group in decoder.continue_rows(run, rows):
                for number, tokens in group.items():
                    results[number] = tokens
                if done is not None:
                    done(group)
    return results


class _Row(NamedTuple):
    number: int
    prompt: Sequence[int]
    limit: int


class _Decoder:
    """Decoder with a model in eval mode; the arguments are those of `generate`."""

    def __init__(
        self,
        backbone: Backbone,
        stopped: Callable[[int, list[int]], bool] | None,
        samplers: Sequence[Sampler] | None,
    ) -> None:
        self.backbone = backbone
        self.samplers = samplers
        self.end_tokens = _find_end_tokens(backbone)
        self.stopped = stopped
        self.use = cache_use(backbone)

    def continue_rows(self, run: Callable[..., Any], rows: Iterator[_Row]) -> Iterator[dict[int, list[int]]]:
        """Yield the continuations of groups of rows, which must be sorted, the longest first."""
        # 1. A model without a usable cache computes every token from scratch.
        if self.use == "none":
            for row in rows:
                yield {row.number: self._continue_uncached(run, row)}
            return
        room = _cache_bytes(self.backbone.device)
        group: list[_Row] = []
        caches: list[Cache] = []
        first: list[Tensor] = []
        for row in rows:
            # 2. Decode the group when the next row's cache would not fit.
            if group and self._is_full(group, caches[0], row, room):
                yield self._continue_group(run, group, caches, first)
                group, caches, first = [], [], []
            # 3. Prefill: read the prompt, and keep its cache and the logits of its next token.
            logits, cache = read_prompt(self.backbone, run, row.prompt)
            group.append(row)
            caches.append(cache)
            first.append(logits)
        if group:
            yield self._continue_group(run, group, caches, first)

    def _is_full(self, group: list[_Row], cache: Cache, row: _Row, room: int) -> bool:
        """Return whether the padded caches of a group leave no memory for another row."""
        if self.use == "alone" or len(group) == MAX_GROUP:
            return True
        longest = max(len(one.prompt) for one in (*group, row))
        tokens = longest + max(one.limit for one in (*group, row))
        return (len(group) + 1) * tokens * _count_bytes(cache) / len(group[0].prompt) > room

    def _continue_group(
        self, run: Callable[..., Any], group: list[_Row], caches: list[Cache], first: list[Tensor]
    ) -> dict[int, list[int]]:
        """Return the continuations of a group after prefill; its caches are consumed."""
        # 1. Join the caches, and take the first token of each row from the logits of the prefill.
        lengths = [len(row.prompt) for row in group]
        last = self._choose_tokens(torch.cat(first), group)
        cache, caches[:] = _stack_caches(caches), []
        continuations: list[list[int]] = [[] for _ in group]
        active = set(range(len(group)))
        for step in range(max(row.limit for row in group)):
            # 2. Append the newest tokens. Finished rows stay in the batch, but their tokens are ignored.
            for index, token in enumerate(last.tolist()):
                if index in active and not self._append_token(group[index], continuations[index], token):
                    active.discard(index)
            if not active:
                break
            # 3. Run the newest token of each row through the model.
            last = self._choose_tokens(next_logits(self.backbone, run, last, lengths, step, cache), group)
        return {row.number: tokens for row, tokens in zip(group, continuations, strict=True)}

    def _continue_uncached(self, run: Callable[..., Any], row: _Row) -> list[int]:
        tokens = torch.tensor([row.prompt], device=self.backbone.device)
        continuation: list[int] = []
        while True:
            token = self._choose_tokens(_uncached_logits(self.backbone, run, tokens), [row])
            if not self._append_token(row, continuation, int(token)):
                return continuation
            tokens = torch.cat([tokens, token[None]], dim=1)

    def _choose_tokens(self, logits: Tensor, rows: Sequence[_Row]) -> Tensor:
        """Return the ``[B]`` next tokens of rows, given their ``[B, V]`` logits."""
        if self.samplers is None:
            return logits.argmax(-1)
        drawn = [self.samplers[row.number](own) for row, own in zip(rows, logits, strict=True)]
        return torch.tensor(drawn, device=logits.device)

    def _append_token(self, row: _Row, continuation: list[int], token: int) -> bool:
        """Append a token to a continuation, unless it is an end token; return whether to continue."""
        if token in self.end_tokens:
            return False
        continuation.append(token)
        is_stopped = self.stopped is not None and self.stopped(row.number, continuation)
        return not is_stopped and len(continuation) < row.limit


def read_prompt(backbone: Backbone, run: Callable[..., Any], prompt: Sequence[int]) -> tuple[Tensor, Cache]:
    """Run a prompt through the model; return ``[1, V]`` logits of the next token, and the prompt's cache."""
    cache = DynamicCache(config=backbone.base_model.config)
    batch = padded_rows([prompt], backbone.device)
    backbone.check_batch(batch)
    windowed = any(cache.is_sliding) and "flash" not in backbone.attention
    chunk = WINDOWED_CHUNK if windowed else len(prompt)
    chunks = zip(batch["input_ids"].split(chunk, 1), batch["position_ids"].split(chunk, 1), strict=True)
    logits = torch.zeros(0)
    for tokens, positions in chunks:
        with last_layer_reads_from(backbone.decoder, tokens.shape[1] - 1 if backbone.trims_last_layer else 0):
            logits = run(backbone.unsharded, partial(_last_logits, backbone, tokens, positions, cache))
    return logits, cache


def next_logits(
    backbone: Backbone, run: Callable[..., Any], last: Tensor, lengths: Sequence[int], step: int, cache: Cache
) -> Tensor:
    """Return ``[B, V]`` logits of the tokens that follow the ``[B]`` last tokens of a group.

    The cache, padded on the left, has prompts of these lengths and ``step`` new tokens, but not the last tokens yet.
    """
    length = torch.tensor(lengths, device=last.device)[:, None]
    longest, mask = max(lengths), None
    if min(lengths) < longest:
        mask = torch.arange(longest + step + 1, device=last.device) >= longest - length
    return run(backbone.unsharded, lambda: _last_logits(backbone, last[:, None], length + step, cache, mask))


def _last_logits(
    backbone: Backbone, tokens: Tensor, positions: Tensor, cache: Cache | None, mask: Tensor | None = None
) -> Tensor:
    arguments: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    with boundaries_only(), uncompiled(backbone.decoder):  # each row is one document, whatever its first position
        hidden_states = backbone.decoder(
            input_ids=tokens, position_ids=positions, attention_mask=mask, **arguments
        ).last_hidden_state
    return backbone.logits(hidden_states[:, -1])


def _uncached_logits(backbone: Backbone, run: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Return ``[1, V]`` logits of the token after ``[1, T]`` tokens."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    return run(backbone.unsharded, lambda: _last_logits(backbone, tokens, positions, None))


def _stack_caches(caches: list[Cache]) -> Cache:
    """Join caches of one row each into one cache, padded on the left. Frees their memory layer by layer."""
    if len(caches) == 1:
        return caches[0]
    longest = max(cache.get_seq_length() for cache in caches)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        if not layers[0].is_initialized:  # the layer shares the keys and values of another layer
            continue
        for name in ("keys", "values"):
            rows = [getattr(layer, name) for layer in layers]
            width = max(row.shape[-2] for row in rows)  # sliding windows keep fewer tokens
            stacked = torch.cat([F.pad(row, (0, 0, width - row.shape[-2], 0)) for row in rows])
            for layer in layers:
                setattr(layer, name, None)
            setattr(layers[0], name, stacked)
        if isinstance(layers[0], DynamicSlidingWindowLayer):
            layers[0].cumulative_length = longest
    return caches[0]


def _count_bytes(cache: Cache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CACHE_BYTES
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) // 3


def cache_use(backbone: Backbone) -> CacheUse:
    """Return how a model can use a cache, from a trial with two prompts of different length; kept in the backbone."""
    if backbone.cache_use is None:
        with torch.no_grad(), eval_mode(backbone):
            backbone.cache_use = _try_cache(backbone)
        if backbone.cache_use == "none":
            log.warning(
                "`%s` does not support a key-value cache: every new token is computed from all preceding tokens.",
                type(backbone.base_model).__name__,
            )
    return backbone.cache_use


def _try_cache(backbone: Backbone) -> CacheUse:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocabulary_size, (14,), generator=generator).tolist()
    prompts, last = [tokens[:7], tokens[7:12]], torch.tensor(tokens[12:], device=backbone.device)
    with lockstep(backbone) as run:
        whole = ([*prompt, token] for prompt, token in zip(prompts, tokens[12:], strict=True))
        expected = torch.cat([_uncached_logits(backbone, run, last.new_tensor([row])) for row in whole])

        def agrees(groups: list[list[int]]) -> bool:
            try:
                caches = [read_prompt(backbone, run, prompt)[1] for prompt in prompts]
                logits = []
                for group in groups:
                    lengths, cache = [len(prompts[i]) for i in group], _stack_caches([caches[i] for i in group])
                    logits.append(next_logits(backbone, run, last[group], lengths, 0, cache))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # models without support for a cache or for padding may raise anything
                log.info("The trial of %s with groups %s failed: %r", type(backbone.base_model).__name__, groups, error)
                return False
            # In half precision, rounding depends on the shapes; the error of a missing mask or position is far larger.
            tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.2
            difference = (torch.cat(logits).double() - expected.double()).abs().max()
            return bool(difference <= tolerance * expected.double().std().clamp(min=1e-6))

        if _can_be_stacked(backbone) and agrees([[0, 1]]):
            return "together"
        return "alone" if agrees([[0], [1]]) else "none"


def _can_be_stacked(backbone: Backbone) -> bool:
    """Return whether left padding only shifts the given positions: there are no states and no attention chunks."""
    config = backbone.base_model.config
    layers = DynamicCache(config=config).layers
    chunked = getattr(config.get_text_config(decoder=True), "attention_chunk_size", None) is not None
    return not chunked and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _find_end_tokens(backbone: Backbone) -> list[int]:
    """Return the tokens of the generation config that end a continuation and are not part of it."""
    ends = backbone.base_model.generation_config.eos_token_id if backbone.base_model.can_generate() else None
    ends = backbone.base_model.config.get_text_config(decoder=True).eos_token_id if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
