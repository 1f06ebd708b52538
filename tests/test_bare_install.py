"""Training needs torch, transformers, lightning, peft, torchmetrics, and what they require."""

import subprocess
import sys

import pytest

from tests.support.bare_install import required_distributions

IMPORTS = """
import pkgutil, lightning_modules.models, lightning_modules.functional, lightning_modules.metrics
import lightning_modules.long_context_lm, lightning_modules.scoring.evaluator, lightning_modules.training.fsdp
import lightning_modules.training.sequence_parallel, lightning_modules.training.checkpoints.io
from callbacks import ExternalEvaluator, StepCheckpoint
for package in (lightning_modules.models, lightning_modules.functional):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
try:
    import callbacks.key_token_inspector
except ModuleNotFoundError as error:
    print("hidden:", error.name)
"""


@pytest.mark.limit(12)  # imports the libraries
def test_training_imports_without_the_packages_of_commands_and_data(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    command = [sys.executable, "-m", "tests.support.bare_install", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("hidden: "), done.stderr[-2000:]
    assert {"torch", "tokenizers", "accelerate"} <= required_distributions()
