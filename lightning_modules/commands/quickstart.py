"""``longce quickstart``: four ordinary runs of ``longce fit`` and ``validate`` that need only this repository."""

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
    ("Train a tiny base model on short sequences of a synthetic language.", "fit", "quickstart/base.yaml"),
    ("Continue on long sequences: this model becomes the evaluator.", "fit", "quickstart/evaluator.yaml"),
    ("Measure LongPPL of the base model.", "validate", "quickstart/longce.yaml"),
    ("Fine-tune the base model on long sequences with LongCE.", "fit", "quickstart/longce.yaml"),
)


def quickstart(run: Callable[[Sequence[str]], LightningCLI], options: Sequence[str] = ()) -> None:
    """Generate a corpus, train a tiny evaluator and fine-tune a tiny model; each run gets the options."""
    # The matrices are tiny: a second thread saves seconds on an idle machine, and on a busy one the threads wait for
    # each other for minutes.
    torch.set_num_threads(1)
    started = time.monotonic()
    # The last two runs share a folder, so that TensorBoard shows them together.
    version = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number, (purpose, command, config) in enumerate(RUNS, start=1):
        words = [command, "-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / config), *options]
        if config == "quickstart/longce.yaml":
            words += ["--trainer.logger.init_args.version", version]
        _print_line(f"\n[{number}/{len(RUNS)}] {purpose}\n$ longce {shlex.join(words)}")
        log_dir = run(words).trainer.log_dir
    _print_line(f"\n{summary(str(log_dir))}\n")
    _print_line(f"Done in {time.monotonic() - started:.0f} s. To see the curves: tensorboard --logdir {log_dir}")


def summary(log_dir: str) -> str:
    """Return a table of LongPPL and perplexity by step, from the TensorBoard events of a run and its evaluations."""
    columns: dict[str, dict[int, float]] = {"LongPPL": {}, "perplexity": {}}
    for folder in (Path(log_dir), *Path(log_dir, EVALUATIONS_FOLDER).iterdir()):
        events = EventAccumulator(str(folder))
        events.Reload()
        for name, column in columns.items():
            column |= {event.step: event.value for event in events.Scalars(f"val/{name.lower()}")}
    table = pd.DataFrame(columns).sort_index().rename_axis("step").reset_index()
    return table.to_string(index=False, na_rep="nan", float_format="{:.2f}".format)


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
