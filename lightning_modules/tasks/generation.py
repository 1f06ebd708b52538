"""Generation for many prompts, with a key-value cache: greedy, or sampled.

Prefill runs one prompt at a time, without padding or a mask. Then the caches of a group are padded on the left to one
length, and the group decodes together, one token per pass. A trial run detects models that do not support this. A
prompt whose RoPE would change as it grows (dynamic NTK, LongRoPE) is continued alone, without a cache.
"""

# Why not `transformers.generate` (measured with 5.23): it reads a padded batch with a [B, 1, T, T] mask, 1 GiB for each
# prompt of 32k tokens; it takes unset options from the model's `generation_config` even if it is given one, so that a
# `repetition_penalty` changes greedy answers; its samples depend on the other prompts of the batch; and with FSDP2,
# `synced_gpus` counts the passes of one call, so that ranks with different numbers of prompts wait for each other
# forever.

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lightning_modules.models.backbone import Backbone, CacheUse
from lightning_modules.models.context_extension.length_dependent import forget_earlier_lengths, rotation_key
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, no_autocast_cache, uncompiled
from lightning_modules.tasks.sampling import Sampler, find_end_tokens
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
    done: Callable[[dict[int, list[int]]], None] = lambda _: None,
    stopped: Callable[[int, list[int]], bool] = lambda _, __: False,
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
    forget_earlier_lengths(backbone.base_model)  # for models that are not from `load_backbone`
    rows = [_Row(number, *row) for number, row in enumerate(zip(prompts, limits, strict=True))]
    for row in rows:
        lengths = len(row.prompt), row.max_length - 1  # of the first and the last pass
        row.rotations = sorted({rotation_key(backbone.base_model.config, length) for length in lengths})
    backbone.check_length(max((row.max_length for row in rows), default=0))
    # Rows of a group decode until the last one is done, so group prompts with similar limits and lengths.
    longest_first = sorted(rows, key=lambda row: (row.rotations, row.limit, len(row.prompt)), reverse=True)
    with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), lockstep(backbone) as run:
        decoder = _Decoder(backbone, run, stopped, samplers)
        for group in decoder.continue_rows(longest_first):
            done({row.number: row.continuation for row in group})
    return [row.continuation for row in rows]


@dataclass
class _Row:
    """A prompt and its continuation so far; without a cache if its passes have several ``rotations``."""

    number: int
    prompt: Sequence[int]
    limit: int
    rotations: list[int] = field(default_factory=list)
    continuation: list[int] = field(default_factory=list)
    is_active: bool = True

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.limit


class _Decoder:
    """Decoder with a model in eval mode; the arguments are those of `generate` and `lockstep`."""

    def __init__(
        self,
        backbone: Backbone,
        run: Callable[..., Any],
        stopped: Callable[[int, list[int]], bool],
        samplers: Sequence[Sampler] | None,
    ) -> None:
        self.backbone = backbone
        self.run = run
        self.samplers = samplers
        self.end_tokens = find_end_tokens(backbone)
        self.stopped = stopped
        self.use = cache_use(backbone)

    def continue_rows(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Continue rows, which must be sorted, the longest first; yield each group that is done."""
        room = _cache_bytes(self.backbone.device)
        group: list[_Row] = []
        caches: list[Cache] = []
        first: list[Tensor] = []
        for row in rows:
            # 1. Decode the group when the next row's cache would not fit.
            if group and self._is_full(group, caches, row, room):
                self._continue_group(group, caches, torch.cat(first))
                yield group
                group, caches, first = [], [], []
            # 2. Prefill: read the prompt, and keep its cache and the logits of its next token.
            group.append(row)
            if self.use == "none" or len(row.rotations) > 1:
                first.append(_uncached_logits(self.backbone, self.run, row.prompt))
            else:
                logits, cache = read_prompt(self.backbone, self.run, row.prompt)
                caches.append(cache)
                first.append(logits)
        if group:
            self._continue_group(group, caches, torch.cat(first))
            yield group

    def _is_full(self, group: list[_Row], caches: list[Cache], row: _Row, room: int) -> bool:
        """Return whether a row cannot join a group, whose padded caches may leave no memory for it."""
        if self.use != "together" or len(group) == MAX_GROUP:
            return True
        longest_prompt = max(len(one.prompt) for one in (*group, row))
        tokens = longest_prompt + max(one.limit for one in (*group, row))
        # The longest row rotates all of them, also when it is finished.
        if not row.rotations == group[0].rotations == [rotation_key(self.backbone.base_model.config, tokens - 1)]:
            return True
        bytes_per_token = _count_bytes(caches[0]) / len(group[0].prompt)
        return (len(group) + 1) * tokens * bytes_per_token > room

    def _continue_group(self, group: list[_Row], caches: list[Cache], logits: Tensor) -> None:
        """Continue a group after prefill, given the ``[B, V]`` logits of its first tokens; its caches are consumed."""
        cache = _stack_caches(caches) if caches else None
        lengths = [len(row.prompt) for row in group]
        for step in range(max(row.limit for row in group)):
            # 1. Append the next token of each row. Finished rows stay in the batch, but their tokens are ignored.
            last = self._choose_tokens(logits, group)
            for row, token in zip(group, last.tolist(), strict=True):
                if row.is_active:
                    self._append_token(row, token)
            if not any(row.is_active for row in group):
                return
            # 2. Run the newest tokens through the model; without a cache, all tokens of the only row.
            if cache is None:
                logits = _uncached_logits(self.backbone, self.run, [*group[0].prompt, *group[0].continuation])
            else:
                logits = next_logits(self.backbone, self.run, last, lengths, step, cache)

    def _choose_tokens(self, logits: Tensor, group: Sequence[_Row]) -> Tensor:
        """Return the ``[B]`` next tokens of rows, given their ``[B, V]`` logits."""
        if self.samplers is None:
            return logits.argmax(-1)
        drawn = [self.samplers[row.number](own) for row, own in zip(group, logits, strict=True)]
        return torch.tensor(drawn, device=logits.device)

    def _append_token(self, row: _Row, token: int) -> None:
        """Append a token to a row, unless it is an end token, and mark the row if it is finished."""
        if token in self.end_tokens:
            row.is_active = False
            return
        row.continuation.append(token)
        row.is_active = len(row.continuation) < row.limit and not self.stopped(row.number, row.continuation)


def read_prompt(backbone: Backbone, run: Callable[..., Any], prompt: Sequence[int]) -> tuple[Tensor, Cache]:
    """Run a prompt through the model; return ``[1, V]`` logits of the next token, and the prompt's cache."""
    cache = DynamicCache(config=backbone.base_model.config)
    batch = padded_rows([prompt], backbone.device)
    backbone.check_batch(batch)
    windowed = any(cache.is_sliding) and "flash" not in backbone.attention
    # A chunk must not be rotated like a shorter text.
    rotations = {rotation_key(backbone.base_model.config, length) for length in (WINDOWED_CHUNK, len(prompt))}
    chunk = WINDOWED_CHUNK if windowed and len(rotations) == 1 else len(prompt)
    chunks = zip(batch["input_ids"].split(chunk, 1), batch["position_ids"].split(chunk, 1), strict=True)
    logits = torch.zeros(0)
    for tokens, positions in chunks:
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
    with uncompiled(backbone.decoder):
        hidden_states = backbone.decoder(
            input_ids=tokens, position_ids=positions, attention_mask=mask, **arguments
        ).last_hidden_state
    return backbone.logits(hidden_states[:, -1])


def _uncached_logits(backbone: Backbone, run: Callable[..., Any], tokens: Sequence[int]) -> Tensor:
    """Return ``[1, V]`` logits of the token after all these tokens."""
    batch = padded_rows([tokens], backbone.device)
    backbone.check_batch(batch)
    return run(backbone.unsharded, lambda: _last_logits(backbone, batch["input_ids"], batch["position_ids"], None))


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
    prompts, last = [tokens[:7], tokens[7:12]], tokens[12:]
    with lockstep(backbone) as run:
        whole = [[*prompt, token] for prompt, token in zip(prompts, last, strict=True)]
        expected = torch.cat([_uncached_logits(backbone, run, row) for row in whole]).double()

        def continue_from_caches(group: list[int]) -> Tensor:
            caches = [read_prompt(backbone, run, prompts[row])[1] for row in group]
            newest = torch.tensor([last[row] for row in group], device=backbone.device)
            return next_logits(backbone, run, newest, [len(prompts[row]) for row in group], 0, _stack_caches(caches))

        def agrees(groups: list[list[int]]) -> bool:
            try:
                logits = torch.cat([continue_from_caches(group) for group in groups])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # models without support for a cache or for padding may raise anything
                log.info("The trial of %s with groups %s failed: %r", type(backbone.base_model).__name__, groups, error)
                return False
            # In half precision, rounding depends on the shapes; the error of a missing mask or position is far larger.
            tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.2
            difference = (logits.double() - expected).abs().max()
            return bool(difference <= tolerance * expected.std().clamp(min=1e-6))

        if _can_be_stacked(backbone) and agrees([[0, 1]]):
            return "together"
        return "alone" if agrees([[0], [1]]) else "none"


def _can_be_stacked(backbone: Backbone) -> bool:
    """Return whether left padding only shifts the given positions: there are no states and no attention chunks."""
    config = backbone.base_model.config
    layers = DynamicCache(config=config).layers
    chunked = getattr(config.get_text_config(decoder=True), "attention_chunk_size", None) is not None
    return not chunked and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
