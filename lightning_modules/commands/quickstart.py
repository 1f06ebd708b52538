"""The embedded default: four ordinary runs of the command line that need nothing but this repository."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from lightning.pytorch.cli import LightningCLI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.training.evaluation import EVALUATIONS_FOLDER

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = (
    ("A tiny model learns the made-up language, in short rows.", "fit", "quickstart/base.yaml"),
    ("It continues in long rows and becomes the evaluator.", "fit", "quickstart/evaluator.yaml"),
    ("The evaluator judges the model as it was after its short rows.", "validate", "quickstart/longce.yaml"),
    ("That model is fine-tuned in long rows with LongCE.", "fit", "quickstart/longce.yaml"),
)


def quickstart(run: Callable[[Sequence[str]], LightningCLI], options: Sequence[str] = ()) -> None:
    """Make a corpus, train a tiny evaluator and fine-tune a tiny model; the options go to each of these runs."""
    # These matrices are tiny. A second thread saves seconds on an idle machine, and where another process runs too the
    # threads wait for each other for minutes.
    torch.set_num_threads(1)
    started = time.monotonic()
    # The last two runs share a folder, so that TensorBoard shows them together.
    version = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number, (purpose, command, config) in enumerate(RUNS, start=1):
        words = [command, "-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / config), *options]
        if config == "quickstart/longce.yaml":
            words += ["--trainer.logger.init_args.version", version]
        _say(f"\n[{number}/{len(RUNS)}] {purpose}\n$ longce {shlex.join(words)}")
        log_dir = run(words).trainer.log_dir
    _say(f"\n{summary(str(log_dir))}\n")
    _say(f"Done in {time.monotonic() - started:.0f} s. See it: tensorboard --logdir {log_dir}")


def summary(log_dir: str) -> str:
    """Make a table of LongPPL and perplexity by step, from the events of a run and of its evaluations."""
    columns: dict[str, dict[int, float]] = {"LongPPL": {}, "perplexity": {}}
    for folder in (Path(log_dir), *Path(log_dir, EVALUATIONS_FOLDER).iterdir()):
        events = EventAccumulator(str(folder))
        events.Reload()
        for name, column in columns.items():
            column |= {event.step: event.value for event in events.Scalars(f"val/{name.lower()}")}
    table = pd.DataFrame(columns).sort_index().rename_axis("step").reset_index()
    return table.to_string(index=False, na_rep="nan", float_format="{:.2f}".format)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
