import pytest
import torch
from torch import nn

from lightning_modules.batch import IGNORE_INDEX

VOCABULARY = 29


@pytest.fixture
def problem():
    """Hidden states, a head and labels, in float64."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 17, 8, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(8, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (2, 17))
    labels[:, 0] = IGNORE_INDEX
    labels[0, 5] = labels[1, 9:] = IGNORE_INDEX  # a document border, and padding
    return hidden, head, labels
