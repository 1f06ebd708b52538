"""Tiny models, and batches of packed documents of random tokens."""

import torch
from transformers import AutoModelForCausalLM

from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.models.attention import register_document_attention
from tests.conftest import tiny_config

VOCABULARY = 120


def packed(*rows, length=None):
    """Rows of documents (lists of token ids) as a batch, padded on the right."""
    length = length or max(sum(map(len, row)) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "labels": torch.full((len(rows), length), IGNORE_INDEX),
        "position_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "document_boundaries": [],
    }
    for index, row in enumerate(rows):
        boundaries = [0]
        for document in row:
            start, stop = boundaries[-1], boundaries[-1] + len(document)
            batch["input_ids"][index, start:stop] = batch["labels"][index, start:stop] = document
            batch["labels"][index, start] = IGNORE_INDEX
            batch["position_ids"][index, start:stop] = torch.arange(len(document))
            boundaries.append(stop)
        batch["document_boundaries"].append(boundaries)
    return with_scored(batch)


def documents(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def build(architecture, attention="document_sdpa", **overrides):
    if attention == "document_sdpa":
        register_document_attention()
    torch.manual_seed(0)
    config = tiny_config(architecture, VOCABULARY, **overrides)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def assume_isolation(backbone):
    """Score several documents in one pass, as `check_scoring` allows after its measurements."""
    backbone.isolates_documents = True
    return backbone
