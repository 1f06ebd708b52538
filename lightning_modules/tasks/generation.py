"""Continue prompts with `transformers.generate`, one at a time: without padding, a mask, or options of the model."""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from transformers import GenerationConfig, StoppingCriteriaList

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.length_dependent import forget_earlier_lengths, rotation_key
from lightning_modules.models.lockstep import lockstep
from lightning_modules.models.optimizations import eval_mode, no_autocast_cache, uncompiled
from lightning_modules.tasks.teacher_forcing import padded_rows

_log = logging.getLogger(__name__)

_CONTINUES_FROM_CACHE: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
"""Whether models that are not part of transformers use their cache."""

WINDOWED_CHUNK = 2048  # prefill chunk of models with sliding windows: the number of rows of their mask


def generate(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    end_tokens: Sequence[int] = (),
    stopping: StoppingCriteriaList | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    seed: Any = 0,
    done: Callable[[int, list[int]], None] = lambda *_: None,
) -> list[list[int]]:
    """Continue each prompt, and return the new tokens without the end token.

    The model's own generation config counts for its end tokens only: a penalty in it would change greedy answers. Mode,
    generation config and random states are restored. If weights are sharded, all processes must call this, each with
    any number of prompts.

    Args:
        backbone: The model.
        prompts: Token ids of each prompt.
        max_new_tokens: Limit of new tokens, for all prompts or for each.
        end_tokens: Tokens that end a continuation, in addition to those of the model.
        stopping: Further criteria to stop.
        options: Arguments of `transformers.GenerationConfig`, such as ``do_sample`` and ``temperature``.
        seed: A sampled continuation depends on this and on its prompt, and not on other prompts.
        done: Called with the index of each prompt and its new tokens.

    Raises:
        ValueError: If the model cannot generate, or a prompt has unknown tokens or is too long for the model.
    """
    model = backbone.base_model
    if not model.can_generate():
        raise ValueError(
            f"`{type(model).__name__}` cannot generate: set `mode` to 'teacher_forced', or use another model."
        )
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    backbone.check_length(max(lengths, default=0))
    forget_earlier_lengths(model)
    ends = [*_find_end_tokens(backbone), *end_tokens]
    continuations: list[list[int]] = []
    with _only_end_tokens_configured(backbone), _forward_in_lockstep(backbone):
        has_cache = _continues_from_cache(backbone)
        for number, prompt in enumerate(prompts):
            backbone.check_batch(padded_rows([prompt], backbone.device))
            cache: dict[str, Any] = {"use_cache": False}
            if has_cache:
                cache = _cache_options(backbone, len(prompt), lengths[number])
            config = GenerationConfig(
                **{"do_sample": False, "num_beams": 1, **options},
                max_new_tokens=limits[number],
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **cache,
            )
            digest = hashlib.sha256(repr((seed, list(prompt))).encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            ids = torch.tensor([list(prompt)], device=backbone.device)
            whole: Any = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=stopping,
                synced_gpus=False,  # the passes are in lockstep already
            )
            new = whole[0, len(prompt) :].tolist()
            if new and new[-1] in ends:
                new.pop()
            continuations.append(new)
            done(number, new)
    return continuations


def _continues_from_cache(backbone: Backbone) -> bool:
    """Return whether a model continues a text from its cache as from all tokens.

    Models of transformers do. Other code may ignore the cache, and would generate wrong text without an error.
    """
    model: Any = backbone.base_model
    if type(model).__module__.startswith("transformers."):
        return True
    if model in _CONTINUES_FROM_CACHE:
        return _CONTINUES_FROM_CACHE[model]
    ids = torch.arange(min(8, backbone.vocabulary_size), device=backbone.device)[None]
    second_logits = []
    for use_cache in (True, False):
        config = GenerationConfig(do_sample=False, max_new_tokens=2, use_cache=use_cache, pad_token_id=0)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            synced_gpus=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        second_logits.append(output.logits[1].double())
    cached, expected = second_logits
    # In half precision, rounding depends on the shapes; the error of an ignored cache is far larger.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    agrees = bool((cached - expected).abs().max() <= tolerance * expected.std().clamp(min=1e-6))
    if not agrees:
        _log.warning(
            "`%s` ignores its key-value cache: every new token is computed from all preceding tokens.",
            type(model).__name__,
        )
    _CONTINUES_FROM_CACHE[model] = agrees
    return agrees


def _cache_options(backbone: Backbone, prompt_length: int, length: int) -> dict[str, Any]:
    """Return whether the cache is used, and the prefill chunk of models with sliding windows."""
    config = backbone.base_model.config
    rotations = {rotation_key(config, prompt_length), rotation_key(config, length - 1)}
    if len(rotations) > 1:
        # RoPE changes as the text grows (dynamic NTK, LongRoPE), and keys in a cache would keep the earlier rotation.
        return {"use_cache": False}
    # A chunk must not be rotated like a shorter text, either.
    rotations.add(rotation_key(config, min(WINDOWED_CHUNK, prompt_length)))
    text_config = config.get_text_config(decoder=True)
    is_windowed = getattr(text_config, "sliding_window", None) is not None and "flash" not in backbone.attention
    if is_windowed and len(rotations) == 1 and prompt_length > WINDOWED_CHUNK:
        return {"use_cache": True, "prefill_chunk_size": WINDOWED_CHUNK}
    return {"use_cache": True}


@contextmanager
def _only_end_tokens_configured(backbone: Backbone) -> Iterator[None]:
    """Put the model into eval mode without gradients, and hide its generation config; restore everything afterwards."""
    model = backbone.base_model
    before = model.generation_config
    # `generate` takes options that its own config does not set from the model's.
    model.generation_config = GenerationConfig(
        bos_token_id=before.bos_token_id, decoder_start_token_id=before.decoder_start_token_id
    )
    try:
        with torch.no_grad(), no_autocast_cache(), eval_mode(backbone), uncompiled(backbone.decoder), isolate_rng():
            yield
    finally:
        model.generation_config = before


@contextmanager
def _forward_in_lockstep(backbone: Backbone) -> Iterator[None]:
    """Run the same number of forward passes in all ranks that share the weights, regardless of their texts.

    `generate` has `synced_gpus`, but it counts the passes of one call, and ranks have different numbers of prompts.
    """
    model = backbone.base_model
    forward = model.forward
    with lockstep(backbone) as run:

        @functools.wraps(forward)
        def gathered_forward(*args: Any, **kwargs: Any) -> Any:
            return run(backbone.unsharded, functools.partial(forward, *args, **kwargs))

        if backbone.is_sharded:
            model.forward = gathered_forward
        try:
            yield
        finally:
            if backbone.is_sharded:
                del model.forward


def _find_end_tokens(backbone: Backbone) -> list[int]:
    """Return the tokens that end a continuation, by the generation config, or otherwise by the config of the model."""
    ends = backbone.base_model.generation_config.eos_token_id
    if ends is None:
        ends = backbone.base_model.config.get_text_config(decoder=True).eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
