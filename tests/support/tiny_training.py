"""Training of a tiny model on rows of random tokens."""

import torch
from torch.utils.data import DataLoader

from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.long_context_lm import LongContextLM
from tests.support.trainers import quiet_trainer

VOCABULARY = 90
LENGTH = 40
TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024}
"""A config for the words of `RecallDataModule`."""


def row(seed, boundaries=(0, LENGTH), vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, boundaries[-1]), generator=generator)
    labels, positions = ids.clone(), torch.arange(boundaries[-1]).unsqueeze(0).clone()
    for start in boundaries[:-1]:
        labels[0, start] = IGNORE_INDEX
        positions[0, start:] -= positions[0, start].clone()
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_boundaries": [list(boundaries)]}
    return with_scored(batch)


def loader(*rows):
    return DataLoader(list(rows), batch_size=None)


def trainer(root, **settings):
    """A quiet trainer of two steps."""
    defaults = {"callbacks": [], "max_steps": 2, "log_every_n_steps": 1, "use_distributed_sampler": True}
    settings = {**defaults, **settings}
    return quiet_trainer(root, *settings.pop("callbacks"), **settings)


def lm(folder, **settings):
    return LongContextLM(folder, **{"context_length": 8, "stride": 4, **settings})
