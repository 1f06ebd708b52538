"""Trainings in processes of their own, for `tests.support.faults`: started again, and compared to the last bit."""

import copy
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from lightning import Callback
from tqdm import tqdm

from longce.cli.main import main
from tests.conftest import byte_level_tokenizer, make_text, tiny_model
from tests.support.experiments import book_data, component, evaluator, experiment, tensorboard
from tests.support.texts import write_books

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "base.yaml")

HANGS = 300.0
"""Seconds without an end after which a run counts as hung, and is killed."""


class Recorder(Callback):
    """Appends a line for each batch and evaluation, which no kill takes back: numbers to the last bit.

    It waits ``pause`` seconds after each batch, so that a test has the time to disturb the run before its end.
    """

    def __init__(self, folder: str, pause: float = 0.0) -> None:
        self.folder = folder
        self.pause = pause

    def write(self, trainer, *line):
        with open(f"{self.folder}/rank{trainer.global_rank}.jsonl", "ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        tokens = zlib.crc32(batch["input_ids"].numpy().tobytes())
        self.write(trainer, number, tokens, outputs["loss"].item().hex())
        time.sleep(self.pause)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            values = {name: trainer.callback_metrics[name].item().hex() for name in ("val/longppl", "val/perplexity")}
            self.write(trainer, f"evaluation after step {trainer.global_step}", values)


@dataclass
class Run:
    """One training, started as often as it takes."""

    folder: Path
    ranks: int = 1
    processes: list[int] = field(default_factory=list)
    sharded: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "runs" / "longce" / "run" / "checkpoints"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(self, *options: str, patch: Callable[[int], None] = lambda rank: None) -> None:
        """Go on with the last checkpoint, after `patch(rank)` in each process."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (self.folder / "log.txt").write_text("")
        self.processes = [self._fork(rank, port, options, patch) for rank in range(self.ranks)]

    def _fork(self, rank, port, options, patch):
        sys.stdout.flush()
        if process := os.fork():
            return process
        status = 1
        try:
            log = os.open(self.folder / "log.txt", os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.dump_traceback_later(0.8 * HANGS, file=log)
            tqdm.set_lock(threading.RLock())  # the default is shared with all forked processes: a kill would keep it
            os.environ["LONGCE_CACHE"] = str(self.cache)
            if self.ranks > 1:
                os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.chdir(self.folder)
            patch(rank)
            sys.argv = ["longce", "fit", "-c", BASE, "-c", "config.yaml", "--ckpt_path", "last", *options]
            main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def wait(self) -> tuple[list[int], float]:
        """Exit statuses by rank, negative for signals, and the seconds until the last process had ended."""
        begin = time.monotonic()
        while any(self.alive(rank) for rank in range(self.ranks)):
            if time.monotonic() - begin > HANGS:
                for process in self.processes:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in self.processes]
        return statuses, time.monotonic() - begin

    def train(self, *options: str) -> list[int]:
        """Train to the end, and return the exit statuses."""
        self.start(*options)
        return self.wait()[0]

    def alive(self, rank: int = 0) -> bool:
        return os.waitid(os.P_PID, self.processes[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def until(self, moment: Callable[[], bool]) -> bool:
        """Wait for a moment; whether it came before the run's end."""
        begin = time.monotonic()
        while not moment():
            if not self.alive() or time.monotonic() - begin > HANGS:
                return False
            time.sleep(0.0005)
        return True

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def records(self, rank: int = 0) -> list[list]:
        path = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lost(self) -> int:
        """The most batches that were trained on again after one interruption."""
        numbers = [number for number, *_ in self.records() if isinstance(number, int)]
        return max((a - b + 1 for a, b in itertools.pairwise(numbers) if b <= a), default=0)

    def differences(self, undisturbed: "Run") -> list[str]:
        """What is not as in the undisturbed run: batches, losses and evaluations of each process."""
        found = []
        for rank in range(self.ranks):
            expected = {number: rest for number, *rest in undisturbed.records(rank)}
            own = {number for number, *_ in self.records(rank)}
            found += [f"rank {rank}: no batch {n}" for n in expected if isinstance(n, int) and n not in own]
            found += [
                f"rank {rank}, batch {number}: {rest}, not {expected.get(number)}"
                for number, *rest in self.records(rank)
                if expected.get(number) != rest
            ]
        return found


def prepare(folder: Path) -> None:
    """Models, texts and a config to train by."""
    texts = [make_text(250, seed) for seed in range(8)]
    write_books(folder / "books", train=texts[:6], validation=texts[6:], test=texts[:1])
    tokenizer = byte_level_tokenizer(texts)
    for name in ("model", "evaluator"):
        tiny_model("llama", len(tokenizer), attention_dropout=0.1 * (name == "model")).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save = {
        "filename": "step-{step}",
        "auto_insert_metric_name": False,
        "monitor": "step",
        "mode": "max",
        "every_n_train_steps": 1,
        "save_top_k": 2,
        "save_last": "link",
        "save_on_exception": True,
    }
    config = experiment(
        folder / "model",
        book_data(folder / "model", folder / "books"),
        lr=0.003,
        max_steps=12,
        accumulate_grad_batches=2,
        check_val_every_n_epoch=None,
        val_check_interval=10,
        num_sanity_val_steps=0,
        logger=tensorboard(name="longce", version="run"),
        callbacks=[
            evaluator(folder / "evaluator", before_training=False, alpha=0.0, beta=-20.0),
            component("tests.support.fault_runs.Recorder", folder="."),
            component("callbacks.StepCheckpoint", **save),
        ],
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


FSDP2 = {"class_path": "lightning_modules.training.fsdp.FullyShardedStrategy"}
"""With which each process writes its part of a checkpoint."""


def new_run(folder: Path, config: dict, *, ranks: int = 1, workers: int = 0, sharded: bool = False) -> Run:
    """A run of this config in a folder of its own."""
    config = copy.deepcopy(config)
    config["trainer"]["devices"] = ranks
    config["trainer"]["strategy"] = FSDP2 if sharded else "ddp" if ranks > 1 else "auto"
    config["trainer"]["inference_mode"] = not sharded
    config["data"]["init_args"]["num_workers"] = workers
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Run(folder, ranks, sharded=sharded)
