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


def document_log_likelihood(model, input_ids):
    """``[n]`` log-likelihoods of one document from the model's own full logits; entry 0 is 0."""
    logits = model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits[0].double()
    scored = F.log_softmax(logits[:-1], dim=-1).gather(-1, input_ids[1:, None]).squeeze(-1)
    return torch.cat([scored.new_zeros(1), scored])


def long_and_short(model, input_ids, context_length, stride):
    """The pair for one document, window by window as Appendix A.1 of the paper has it, window 0 included."""
    n = len(input_ids)
    long = document_log_likelihood(model, input_ids)
    short = long.clone()
    for start in range(0, n - context_length, stride):
        stop = min(start + context_length + stride, n)
        window = document_log_likelihood(model, input_ids[start:stop])
        short[start + context_length : stop] = window[context_length:]
    return long, short


def longce(model, input_ids, context_length, stride, gamma):
    """Loss of one document, differentiable in the model's parameters."""
    with torch.no_grad():
        _, short = long_and_short(model, input_ids, context_length, stride)
    long = document_log_likelihood(model, input_ids)
    total = 0.0
    for t in range(1, len(input_ids)):
        difference = long[t].item() - short[t].item() if t >= context_length else 0.0
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


def span_token_mask(offsets, spans):
    return [start < end and any(a <= start and end <= b for a, b in spans) for start, end in offsets]


def transfer_influence(influence, offsets, target_offsets):
    result = []
    for start, end in target_offsets:
        characters = []
        for character in range(start, end):
            owners = [w for w, (a, b) in zip(influence, offsets, strict=True) if a <= character < b]
            characters.append(sum(owners) / len(owners) if owners else 1.0)
        result.append(sum(characters) / len(characters) if characters else 0.0)
    return result
