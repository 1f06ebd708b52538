"""The same default for the same argument, wherever it is taken: those of the paper."""

import inspect

import pytest

from callbacks import ExternalEvaluator
from lightning_modules.functional import key_token_mask, short_context_windows, soft_influence
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.short_context import ShortContextConfig
from lightning_modules.objectives import LongCE, StoredInfluence
from lightning_modules.scoring.config import EvaluatorConfig, InspectConfig, ScoreConfig
from lightning_modules.visualization.page import Inspection
from longce.plan.memory import Training

PAPER = {"context_length": 4096, "stride": 1024, "alpha": 2.0, "beta": -2.0, "gamma": 5.0}
TAKE_THEM = [ExternalEvaluator, EvaluatorConfig, InspectConfig, ScoreConfig, Inspection, LongContextLM]
TAKE_THEM += [ShortContextConfig, Training, LongCE, StoredInfluence]
TAKE_THEM += [key_token_mask, short_context_windows, soft_influence]


@pytest.mark.parametrize("name", PAPER)
def test_defaults_are_those_of_the_paper(name):
    signatures = [inspect.signature(each).parameters for each in TAKE_THEM]
    found = [
        one[name].default for one in signatures if name in one and one[name].default is not inspect.Parameter.empty
    ]
    assert len(found) > 2
    assert set(found) == {PAPER[name]}
