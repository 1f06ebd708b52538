"""Run a function in several processes over gloo."""

import multiprocessing
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the process that others are forked from: a child of its own would take five CPU seconds for them.
PRELOADED = ["lightning.pytorch", "peft", "torchmetrics", "transformers", "callbacks", "datamodules"]


def _entry(rank, environment, function, world_size, port, arguments):
    os.environ.clear()
    os.environ |= {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # Processes that do not do the same wait for each other: a failure, not a hang.
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=2))
    try:
        function(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()


def run_distributed(function, *arguments, world_size=2):
    """``function(rank, world_size, *arguments)`` in each of ``world_size`` processes; its failure fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOADED)
    passed = (dict(os.environ), function, world_size, port, arguments)
    mp.start_processes(_entry, args=passed, nprocs=world_size, start_method="forkserver")
