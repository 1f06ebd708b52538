import copy
import json

import pytest
import yaml

from benchmarks.reproduction.miniature.settings import CONFIG, read_settings

# The declared experiments but for sizes: 16 runs of a few steps.
SIZES = {
    "context_length": 16,
    "stride": 8,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    "base": {"sequence_length": 32, "steps": 3, "batch_size": 2, "warmup": 1, "stop_at": 0.0, "check_every": 2},
    "evaluator": {"sequence_length": 64, "steps": 2, "batch_size": 2, "stop_at": None},
    "fine_tuning": {"sequence_length": 64, "steps": 2, "batch_size": 2},
    "family": {
        "second_dialect": [1.0, 0.0],
        "lengths": [
            {"sequence_length": 32, "rope_theta": 500.0},
            {"sequence_length": 64, "rope_theta": 1000.0},
        ],
        "extensions": [1000.0],
    },
    "objectives": {"seeds": [0], "steps": [1, 2], "cross_entropy_steps": [3], "learning_rates": [1e-3, 1e-2]},
    "windows": [{"context_length": 8, "stride": 8}],
    "alphas": [0.0, 2.0],
    "betas": [-8.0, -2.0],
    "evaluation": {"documents": 16, "questions": 5, "depths": 2, "contexts": [4, 8, 16]},
}


@pytest.fixture
def config(tmp_path):
    """File that declares small experiments."""
    declared = yaml.safe_load(CONFIG.read_text())
    for name, value in copy.deepcopy(SIZES).items():
        declared[name] = {**declared[name], **value} if isinstance(value, dict) else value
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(declared))
    return path


@pytest.fixture
def settings(config):
    return read_settings(config)
