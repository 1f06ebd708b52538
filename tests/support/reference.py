"""Slow and obvious versions of the numerical functions: float64, full logits, one token or window at a time."""

import math

import torch
import torch.nn.functional as F

from lightning_modules.batch import IGNORE_INDEX


def token_log_likelihood(hidden_states, head, labels):
    logits = head(hidden_states).double()
    log_likelihood = torch.zeros(labels.shape, dtype=torch.float64)
    for row in range(labels.shape[0]):
        for t in range(1, labels.shape[1]):
            if labels[row, t] != IGNORE_INDEX:
                log_likelihood[row, t] = torch.log_softmax(logits[row, t - 1], dim=0)[labels[row, t]]
    return log_likelihood


def document_log_likelihood(model, input_ids, positions=None, visible=None):
    """``[n]`` log-likelihoods of one document from the model's own full logits; entry 0 is 0.

    With positions, which may skip, attention is dense under a mask: ``visible`` is ``[T, T]``, or ``[H, T, T]`` for
    each head, and causal by default.
    """
    inputs = {"input_ids": input_ids.unsqueeze(0)}
    if positions is not None:
        if visible is None:
            visible = torch.ones(len(input_ids), len(input_ids), dtype=torch.bool).tril()
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        mask = mask.reshape(1, -1, len(input_ids), len(input_ids))
        inputs |= {"attention_mask": mask, "position_ids": positions.unsqueeze(0)}
        model.positions = positions
    logits = model(**inputs, use_cache=False).logits[0].double()
    scored = F.log_softmax(logits[:-1], dim=-1).gather(-1, input_ids[1:, None]).squeeze(-1)
    return torch.cat([scored.new_zeros(1), scored])


def long_and_short(model, input_ids, context_length, stride, positions=None):
    """The pair for one document, window by window as Appendix A.1 of the paper has it, window 0 included.

    Positions may skip, and then skip in the windows as well, which lack ``start`` tokens.
    """
    n = len(input_ids)
    long = document_log_likelihood(model, input_ids, positions)
    short = long.clone()
    for start in range(0, n - context_length, stride):
        stop = min(start + context_length + stride, n)
        window_positions = None if positions is None else positions[start:stop] - start
        window = document_log_likelihood(model, input_ids[start:stop], window_positions)
        short[start + context_length : stop] = window[context_length:]
    return long, short


def longce(model, input_ids, context_length, stride, gamma, positions=None, visible=None):
    """Loss of one document, differentiable in the model's parameters; weights come from full attention."""
    with torch.no_grad():
        full, short = long_and_short(model, input_ids, context_length, stride, positions)
    long = document_log_likelihood(model, input_ids, positions, visible)
    total = 0.0
    for t in range(1, len(input_ids)):
        difference = full[t].item() - short[t].item() if t >= context_length else 0.0
        total = total - min(math.exp(difference), gamma) * long[t]
    return total / (len(input_ids) - 1)


def long_perplexity(log_likelihood, influence):
    total = weight = 0.0
    for ll, w in zip(log_likelihood.flatten().tolist(), influence.flatten().double().tolist(), strict=True):
        if w:
            total, weight = total + w * ll, weight + w
    return math.exp(-total / weight) if weight else math.nan


def merge_spans(spans):
    merged = []
    for start, end in spans:
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def character_units(offsets):
    """Tokens of each unit: whoever shares a character, by way of others or not."""
    units = []
    for token, (start, end) in enumerate(offsets):
        mine = {token}
        for unit in [u for u in units if any(max(start, offsets[o][0]) < min(end, offsets[o][1]) for o in u)]:
            units.remove(unit)
            mine |= unit
        units.append(mine)
    return units


def span_token_mask(offsets, spans):
    mask = [False] * len(offsets)
    for unit in character_units(offsets):
        start, end = min(offsets[token][0] for token in unit), max(offsets[token][1] for token in unit)
        for token in unit:
            mask[token] = start < end and any(a <= start and end <= b for a, b in spans)
    return mask


def transfer_influence(influence, offsets, target_offsets):
    result = []
    for start, end in target_offsets:
        characters = []
        for character in range(start, end):
            owners = [w for w, (a, b) in zip(influence, offsets, strict=True) if a <= character < b]
            characters.append(sum(owners) / len(owners) if owners else 1.0)
        result.append(sum(characters) / len(characters) if characters else 0.0)
    return result


def key_tokens(ids, offsets, long, short, model_ids, model_offsets, alpha, beta):
    """Key tokens of the evaluated model, by the paper's rule."""
    covering = [[t for t, (a, b) in enumerate(spans) if a < b] for spans in (offsets, model_offsets)]
    inner = [range(tokens[0], tokens[-1] + 1) if tokens else range(0) for tokens in covering]
    readings = [
        [(ids[t], tuple(offsets[t])) for t in inner[0]],
        [(model_ids[t], tuple(model_offsets[t])) for t in inner[1]],
    ]
    if readings[0] == readings[1]:
        mask = [False] * len(model_ids)
        for theirs, ours in zip(*inner, strict=True):
            mask[ours] = long[theirs] - short[theirs] > alpha and long[theirs] > beta
        return mask
    characters = set()
    for unit in character_units(offsets):
        unit_long, unit_short = sum(long[t] for t in unit), sum(short[t] for t in unit)
        if unit_long - unit_short > alpha and unit_long > beta:
            characters |= {c for t in unit for c in range(*offsets[t])}
    mask = [False] * len(model_ids)
    for unit in character_units(model_offsets):
        own = {c for t in unit for c in range(*model_offsets[t])}
        for token in unit:
            mask[token] = model_offsets[token][0] < model_offsets[token][1] and own <= characters
    return mask
