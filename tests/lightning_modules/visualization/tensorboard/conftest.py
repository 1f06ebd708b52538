import pytest
import torch

from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.visualization.tensorboard.panels import InspectedDocument


@pytest.fixture
def make_document():
    def make(words, lsd=None, long=None, key=(), name="a document"):
        """Tokens with the space before them, as those of GPT-2's tokenizer."""
        text, offsets = "", []
        for word in words:
            offsets.append([len(text), len(text) + len(word)])
            text += word
        count = len(words)
        long = torch.full((count,), -1.0) if long is None else torch.tensor(long)
        short = long - (torch.zeros(count) if lsd is None else torch.tensor(lsd))
        mask = torch.zeros(count, dtype=torch.bool)
        mask[list(key)] = True
        ids = torch.tensor([sorted(set(words)).index(word) for word in words])
        scores = TokenScores(text_sha256(text), "a model", 4, 2, ids, torch.tensor(offsets), long, short)
        return InspectedDocument(name, text, scores, mask, torch.arange(count) > 0)

    return make
