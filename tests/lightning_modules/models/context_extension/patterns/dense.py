"""Each pattern from its paper's formula, with full matrices in float64, and the layers of a model that has it."""

import copy
import math
from itertools import pairwise

import torch


def streaming_llm_distances(length, *, sinks, window):
    """By playing the cache: tokens come one by one, and stand where they stand in it."""
    distance = torch.full((length, length), -1.0, dtype=torch.float64)
    for i in range(length):
        cache = list(range(i + 1))
        if len(cache) > sinks + window:
            cache = cache[:sinks] + cache[-window:]
        for place, j in enumerate(cache):
            distance[i, j] = len(cache) - 1 - place
    return distance


def lm_infinite_distances(length, *, sinks, limit):
    return distances(length, lambda i, j: min(i - j, limit) if j < sinks or i - j < limit else -1)


def rerope_distances(length, *, window):
    return distances(length, lambda i, j: min(i - j, window))


def self_extend_distances(length, *, window, group):
    return distances(
        length, lambda i, j: i - j if i - j < window else i // group - j // group + window - window // group
    )


def dual_chunk_distances(length, *, chunk, c):
    """With the position vectors of the paper (section 3), chunk by chunk."""
    w = c - chunk
    intra = list(range(chunk))
    successive = (list(range(chunk, chunk + w)) + [c - 1] * chunk)[:chunk]
    inter = [c - 1] * chunk

    def distance(i, j):
        apart = i // chunk - j // chunk
        return (intra, successive, inter)[min(apart, 2)][i % chunk] - j % chunk

    return distances(length, distance)


def distances(length, of):
    matrix = torch.full((length, length), -1.0, dtype=torch.float64)
    for i in range(length):
        for j in range(i + 1):
            matrix[i, j] = of(i, j)
    return matrix


def relative_logits(query, key, distance, theta, rotated, zeta=None):
    """``[H, T, T]``: every pair of components of the query turned by distance times frequency against the key's.

    ``theta`` is the base of plain RoPE, or the frequencies one by one.
    """
    if isinstance(theta, float | int):
        theta = [theta ** (-2 * c / rotated) for c in range(rotated // 2)]
    half, scale = rotated // 2, 1 / math.sqrt(query.shape[-1])
    logits = torch.einsum("hid,hjd->hij", query[..., rotated:], key[..., rotated:])
    for c in range(half):
        angle = distance * theta[c]
        qa, qb, ka, kb = query[..., c], query[..., c + half], key[..., c], key[..., c + half]
        aa, bb, ab, ba = (torch.einsum("hi,hj->hij", *pair) for pair in ((qa, ka), (qb, kb), (qa, kb), (qb, ka)))
        part = (aa + bb) * angle.cos() + (ab - ba) * angle.sin()
        logits = logits + (part if zeta is None else part * zeta[c] ** (distance / 512))
    return logits * scale


def relocated(query, key, value, distance, theta, rotated):
    logits = relative_logits(query, key, distance, theta, rotated)
    return logits.masked_fill(distance < 0, -math.inf).softmax(-1) @ value


def alibi(query, key, value, slopes):
    distance = distances(query.shape[1], lambda i, j: i - j)
    logits = query @ key.mT / math.sqrt(query.shape[-1]) - torch.tensor(slopes)[:, None, None].double() * distance
    return logits.masked_fill(distance < 0, -math.inf).softmax(-1) @ value


def xpos(query, key, value, theta, rotated):
    distance = distances(query.shape[1], lambda i, j: i - j)
    zeta = [(c / (rotated / 2) + 0.4) / 1.4 for c in range(rotated // 2)]
    logits = relative_logits(query, key, distance, theta, rotated, zeta)
    return logits.masked_fill(distance < 0, -math.inf).softmax(-1) @ value


def longnet(query, key, value, theta, rotated, segments, rates):
    """Branch by branch, segment by segment: softmax over the chosen tokens, outputs mixed by their denominators."""
    heads, length, _ = query.shape
    exponentials = relative_logits(query, key, distances(length, lambda i, j: i - j), theta, rotated).exp()
    rows = []
    for h in range(heads):
        mixed, denominators = value.new_zeros(value.shape[1:]), value.new_zeros(length)
        for segment, rate in zip(segments, rates, strict=True):
            for start in range(0, length, segment):
                chosen = [t for t in range(start, min(start + segment, length)) if (t - start) % rate == h % rate]
                for i in chosen:
                    seen = [j for j in chosen if j <= i]
                    denominator = exponentials[h, i, seen].sum()
                    output = exponentials[h, i, seen] @ value[h, seen] / denominator
                    mixed = mixed.index_add(0, torch.tensor([i]), (denominator * output)[None])
                    denominators = denominators.index_add(0, torch.tensor([i]), denominator[None])
        rows.append(mixed / denominators[:, None])
    return torch.stack(rows)


def attention(name, parameters, query, key, value, theta, rotated):
    """``[H, T, D]`` output of a pattern by its ``rope_parameters``."""
    p, length = parameters, query.shape[1]
    if name == "alibi":
        return alibi(query, key, value, PRESS_SLOPES[len(query)])
    if name == "xpos":
        return xpos(query, key, value, theta, rotated)
    if name == "longnet":
        return longnet(query, key, value, theta, rotated, p["segment_lengths"], p["dilation_rates"])
    distance = {
        "streaming_llm": lambda: streaming_llm_distances(length, sinks=p["sinks"], window=p["window"]),
        "lm_infinite": lambda: lm_infinite_distances(
            length, sinks=p["sinks"], limit=p["original_max_position_embeddings"]
        ),
        "rerope": lambda: rerope_distances(length, window=p["window"]),
        "self_extend": lambda: self_extend_distances(length, window=p["window"], group=p["group"]),
        "dual_chunk": lambda: dual_chunk_distances(length, chunk=p["chunk"], c=p["original_max_position_embeddings"]),
        "plain": lambda: distances(length, lambda i, j: i - j),
    }[name]()
    return relocated(query, key, value, distance, theta, rotated)


PRESS_SLOPES = {
    2: [2**-4, 2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
}
"""Written out from the paper (section 3) and its code's rule for 6 heads."""


def states_of(layer, hidden_states):
    """``[heads, T, width]`` queries, keys and values of one row before any rotation."""
    width = layer.config.hidden_size // layer.config.num_attention_heads
    if layer.config.model_type == "gpt_neox":
        return layer.query_key_value(hidden_states).view(len(hidden_states), -1, 3 * width).transpose(0, 1).chunk(3, -1)
    names = ("q_proj", "k_proj", "v_proj")
    q, k, v = (getattr(layer, name)(hidden_states).view(len(hidden_states), -1, width) for name in names)
    if layer.config.model_type == "qwen3":
        q, k = layer.q_norm(q), layer.k_norm(k)
    groups = layer.config.num_attention_heads // layer.config.num_key_value_heads
    return [part.transpose(0, 1) for part in (q, *(x.repeat_interleave(groups, 1) for x in (k, v)))]


def layer_output(layer, hidden_states, boundaries, *, name, theta, scale=1.0):
    """One attention layer in float64, each document by itself; ``[T]`` scales multiply the queries."""
    layer, rope = copy.deepcopy(layer).double(), layer.config.rope_parameters
    width = layer.config.hidden_size // layer.config.num_attention_heads
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    scale = scale * torch.ones(len(hidden_states), dtype=torch.float64)
    outputs = []
    for start, stop in pairwise(boundaries):
        query, key, value = states_of(layer, hidden_states[start:stop].double())
        output = attention(name, rope, query * scale[start:stop, None], key, value, theta, rotated)
        outputs.append(output.transpose(0, 1).flatten(1))
    return getattr(layer, "o_proj", getattr(layer, "dense", None))(torch.cat(outputs))


def record_layers(backbone, batch):
    """The attention layers of a model, each with its input and output for a row."""
    seen = []

    def record(layer, args, kwargs, output):
        seen.append((layer, (args or [kwargs["hidden_states"]])[0][0], output[0][0]))

    layers = [layer for layer in backbone.base_model.modules() if type(layer).__name__.endswith("Attention")]
    handles = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    backbone.eval()(batch)
    for handle in handles:
        handle.remove()
    return seen
