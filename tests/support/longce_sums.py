"""Texts for trainers, and the LongCE of a text by a plain formula."""

import math

import torch

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from tests.support import reference

K, D, GAMMA = 8, 4, 5.0


def text(length, *, seed, prompt=0, vocabulary=90):
    """Token ids and labels, which leave out the tokens of a prompt."""
    ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:prompt] = IGNORE_INDEX
    return ids, labels


def pad(texts, side="right"):
    """Inputs of a model: one text in each row."""
    longest = max(len(ids) for ids, _ in texts)
    rows = {"input_ids": [], "labels": [], "attention_mask": []}
    for ids, labels in texts:
        missing = longest - len(ids)
        values = (ids, 0), (labels, IGNORE_INDEX), (torch.ones_like(ids), 0)
        for row, (kept, fill) in zip(rows.values(), values, strict=True):
            padding = torch.full((missing,), fill)
            row.append(torch.cat([kept, padding] if side == "right" else [padding, kept]))
    return {name: torch.stack(row) for name, row in rows.items()}


def documents(texts):
    """A batch of `LongContextLM` with all texts in one sequence."""
    batch = pack_sequence([ids for ids, _ in texts])
    unscored = torch.cat([labels for _, labels in texts]).eq(IGNORE_INDEX)
    batch["labels"][0, unscored] = IGNORE_INDEX
    batch["scored"][0, unscored.numpy()] = False
    return batch


def longce_sum(model, ids, labels):
    """Sum of the LongCE over the scored tokens of a text, differentiable in the model's parameters."""
    with torch.no_grad():
        _, short = reference.long_and_short(model, ids, K, D)
    long = reference.document_log_likelihood(model, ids)
    total = 0.0
    for t in range(1, len(ids)):
        if labels[t] != IGNORE_INDEX:
            total = total - min(math.exp(long[t].item() - short[t].item()), GAMMA) * long[t]
    return total


def count_scored(texts):
    return sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in texts)


def take_steps(model, steps, lr=0.1):
    """Losses of steps of gradient descent on LongCE, each on all of its texts, by the plain formula."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    losses = []
    for texts in steps:
        loss = sum(longce_sum(model, *one) for one in texts) / count_scored(texts)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    weight -= lr * gradient
        losses.append(loss.item())
    return losses


def change_error(model, expected, start):
    """Largest relative error of the changes of all trained weights."""
    triples = list(zip(model.parameters(), expected.parameters(), start.parameters(), strict=True))
    triples = [(one, exact, before) for one, exact, before in triples if not torch.equal(exact, before)]
    assert triples
    changes = [one.detach() - before.detach() for one, _, before in triples]
    return relative_error(changes, [exact.detach() - before.detach() for _, exact, before in triples])


def relative_error(values, exact):
    """Largest error of tensors, each relative to its norm."""
    errors = [(one.double() - other).norm() / other.norm() for one, other in zip(values, exact, strict=True)]
    return max(errors).item()
