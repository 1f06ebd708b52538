"""Shards of a corpus as tasks on a Ray cluster, each like ``longce corpus score --shard I/N``."""

import _thread
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from datamodules.sources.locations import is_url
from lightning_modules.models.loading.config import is_served
from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.progress import progress_bar
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_shard
from longce.corpus.stop_flag import StopFlag
from longce.corpus.writing import signals_stop

RETRIES = 10
"""Maximum number of times that a task restarts and resumes after its process or machine was lost."""

CONNECT_SECONDS = 10
"""Time in which a machine at ``RAY_ADDRESS`` must answer; Ray itself would wait for minutes."""

WATCH_SECONDS = 0.5
"""Time between two looks of a task at whether it must stop."""

STOP_SECONDS = 60
"""Time that stopped tasks have to write finished documents."""


def score_on_ray(files: Sequence[str], config: CorpusConfig) -> dict[str, int]:
    """Score all `num_shards` shards of a corpus as tasks of a Ray cluster, and return their counts together.

    The cluster is that of ``RAY_ADDRESS`` if it is set, or of this machine. Every task loads the model; on a cluster
    with GPUs it gets one. Files and output must be at the same paths on all machines, or at fsspec URLs.

    Raises:
        ValueError: For the reasons of `score_shard`; tasks that run are stopped, and finished documents are kept. If
            no cluster is at ``RAY_ADDRESS``.
        IncompleteError: If more documents of a shard failed than are allowed, or its process was lost too often.
    """
    if not ray.is_initialized():
        _connect()
    shards = config.num_shards or 1
    files = list(map(_make_absolute, files))
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = _make_absolute(tokenizer)
    config = replace(
        config,
        engine="local",
        num_shards=None,
        model=_make_absolute(config.model),
        tokenizer=tokenizer,
        output=_make_absolute(config.output, exists=False),
    )
    on_cpu = config.device == "cpu" or is_served(config.model) or not ray.cluster_resources().get("GPU")
    # It starts again elsewhere if its machine is lost, as tasks do.
    stop = ray.remote(StopFlag).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    gpus = 0 if on_cpu else 1
    task = ray.remote(_score_until_stopped).options(name="score_shard", num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
    running: dict[Any, int] = {}
    for index in range(shards):
        running[task.remote(stop, files, replace(config, shard=f"{index}/{shards}"))] = index
    try:
        with signals_stop():
            counts, lost = _collect(running, shards)
    except BaseException:
        stop.set.remote()
        ray.wait([*running], num_returns=len(running), timeout=STOP_SECONDS)
        raise
    if lost:
        raise IncompleteError("\n".join(lost) + "\nFinished documents are kept: run the same command again.")
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _score_until_stopped(stop: Any, files: Sequence[str], config: CorpusConfig) -> dict[str, int]:
    """Run `score_shard` in a task, and end it like Ctrl-C, which keeps finished documents, when the flag is set."""
    ended = threading.Event()

    def watch() -> None:
        with suppress(ray.exceptions.RayError):  # the process that waits for the task has ended
            while not ray.get(stop.is_set.remote()):
                if ended.wait(WATCH_SECONDS):
                    return
            _thread.interrupt_main()

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        if ray.get(stop.is_set.remote()):
            raise KeyboardInterrupt
        watcher.start()
        try:
            return score_shard(files, config)
        finally:
            ended.set()
            watcher.join()
    except KeyboardInterrupt:  # which would end the process of the task
        raise IncompleteError("It was stopped.") from None


def _connect() -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or to the one on this machine, which is started if needed."""
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        place = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
        if place:
            host, port = place.groups()
            if host in ("localhost", "127.0.0.1"):
                host = ray.util.get_node_ip_address()
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, OverflowError) as error:
        if not address:
            raise
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray cluster can be reached there ({error}). Correct the address, start the"
            " cluster (`ray start --head`), or unset RAY_ADDRESS to use this machine."
        ) from error


def _collect(running: dict[Any, int], shards: int) -> tuple[list[dict[str, int]], list[str]]:
    """Wait for all tasks, and return the counts of those that succeeded, and why others did not."""
    counts = []
    lost = []
    with progress_bar("Scoring", unit=" shards", total=shards, scaled=False) as bar:
        while running:
            (done,), _ = ray.wait([*running], num_returns=1)
            index = running.pop(done)
            try:
                counts.append(ray.get(done))
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, IncompleteError):
                    raise error.cause from None  # the settings or files are wrong, for all shards
                lost.append(f"Shard {index}: {error.cause}")
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())
                lost.append(f"Shard {index}: its process was lost {RETRIES + 1} times ({reason:.300})")
            bar.update()
    return counts, lost


def _make_absolute(path: str, *, exists: bool = True) -> str:
    """Return a local path as an absolute one, because tasks have another working directory; keep ids and URLs."""
    if is_url(path) or is_served(path):
        return path
    local = os.path.expanduser(path)
    if exists and not os.path.exists(local) and "*" not in local:
        return path
    return os.path.abspath(local)
