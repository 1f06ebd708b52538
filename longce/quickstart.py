"""``longce quickstart``: ordinary runs of ``longce fit`` and ``longce inspect`` that need only this repository."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import torch
from lightning.pytorch import Callback, Trainer
from transformers.utils.logging import disable_progress_bar
from typing_extensions import override

from lightning_modules.utilities.statistics import corpus_mean
from longce.cli.config_files import CONFIGS
from longce.cli.lightning_cli import LongceCLI
from longce.compare.command import compare
from longce.compare.runs import read_runs
from longce.inspect import inspect_command

DOCUMENT = "recall-7-1"
"""Validation document whose key tokens are shown: it has more of them than the others."""

FITS = {
    "base": "Train a tiny base model on short sequences",
    "evaluator": "Train it further on long sequences: this is the evaluator",
    "longce": "Fine-tune the base model with LongCE",
}
"""Purposes of the runs of ``longce fit``, by their configs in ``configs/quickstart``."""


def quickstart(options: Sequence[str] = ()) -> None:
    """Train a tiny evaluator, fine-tune a tiny model with LongCE, and write pages; each training gets the options."""
    # The matrices are tiny: a second thread saves seconds on an idle machine, and on a busy one the threads wait for
    # each other for minutes.
    torch.set_num_threads(1)
    disable_progress_bar()
    started = time.monotonic()
    runs = Path("runs/quickstart")
    version = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = runs / "longce" / version
    log = folder / "quickstart.log"
    document = folder / f"{DOCUMENT}.txt"
    page = folder / f"{DOCUMENT}.html"
    folder.mkdir(parents=True)
    for number, (config, purpose) in enumerate(FITS.items(), start=1):
        configs = ["-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / "quickstart" / f"{config}.yaml")]
        named = ["--trainer.logger.init_args.version", version] if config == "longce" else []
        words = ["fit", *configs, *options, *named]
        with _logged(words, log, f"[{number}/4] {purpose}") as line:
            sys.argv[1:] = words
            data: Any = LongceCLI(callbacks=[line]).datamodule
    document.write_text(_find_text(data))
    models = ["--model", f"{runs}/models/longce", "--evaluator", f"{runs}/models/evaluator"]
    words = ["inspect", str(document), *models, "--context_length", "64", "--stride", "64", "--output", str(page)]
    with _logged(words, log, "[4/4] Find the key tokens of a validation document"):
        inspect_command(words)
    compare([folder], folder / "report.html")
    sys.stdout.write(
        f"\n{summary(folder)}\n\nDone in {time.monotonic() - started:.0f} s.\n"
        f"  numbers and curves   {folder / 'report.html'}\n  key tokens           {page}\n"
        f"  TensorBoard          tensorboard --logdir {folder}\n  commands and output  {log}\n"
    )


def summary(log_dir: Path) -> str:
    """Return a table of LongPPL and perplexity by step, from the documents of a run."""
    (evaluations,) = read_runs([log_dir])[0].evaluations.values()
    rows = [
        (step, corpus_mean(documents, "longppl"), corpus_mean(documents, "perplexity"))
        for step, documents in sorted(evaluations.items())
    ]
    table = pd.DataFrame(rows, columns=["step", "LongPPL", "perplexity"])
    return table.to_string(index=False, na_rep="nan", float_format="{:.2f}".format)


class ProgressLine(Callback):
    """One line on a terminal: the purpose of a command, its optimizer steps while it trains, and its duration."""

    def __init__(self, purpose: str, terminal: TextIO) -> None:
        self._purpose = purpose
        self._terminal = terminal
        self._started = time.monotonic()
        self._result = ""
        terminal.write(f"{purpose} .. ")
        terminal.flush()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._terminal.isatty():
            self._terminal.write(f"\r{self._purpose} .. step {trainer.global_step}/{trainer.max_steps}")
            self._terminal.flush()

    @override
    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if "val/longppl" in trainer.callback_metrics:
            self._result = f"LongPPL {float(trainer.callback_metrics['val/longppl']):.2f}, "

    def end(self, failure: str) -> None:
        """Replace the steps by the result, or by a word for the failure."""
        clear = f"\r\033[K{self._purpose} .. " if self._terminal.isatty() else ""
        seconds = time.monotonic() - self._started
        self._terminal.write(f"{clear}{f'{failure} after ' if failure else self._result}{seconds:.0f} s\n")


@contextmanager
def _logged(words: Sequence[str], log: Path, purpose: str) -> Iterator[ProgressLine]:
    """Show one line of progress for a command; append its output and that of its processes to a file."""
    command = f"longce {shlex.join(words)}"
    failure = "failed"
    sys.stdout.flush()
    streams = os.dup(1), os.dup(2)
    with os.fdopen(os.dup(1), "w") as terminal, log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        line = ProgressLine(purpose, terminal)
        file.write(f"$ {command}\n")
        file.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield line
            failure = ""
        except (Exception, SystemExit) as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # which Lightning turns into a SystemExit
                failure = "stopped"
                raise KeyboardInterrupt from error
            file.flush()
            last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            note = f"The command was: {command}\nThe last lines of its output, in {log}:\n{last}"
            if isinstance(error, SystemExit):  # the output has the message
                raise ValueError(note) from error
            error.add_note(note)
            raise
        finally:
            file.write("\n")
            file.flush()
            for descriptor, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream, descriptor)
                os.close(stream)
            line.end(failure)


def _find_text(data: Any) -> str:
    """Return the text of the document to show, or of the first one."""
    texts = {
        name.split()[0]: text
        for batch in data.val_dataloader()
        for name, text in zip(batch["names"], batch["text"], strict=True)
    }
    return texts.get(DOCUMENT, next(iter(texts.values())))
