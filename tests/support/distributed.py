"""Run a function in several processes over gloo."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank, function, world_size, port, arguments):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
    mp.spawn(_entry, args=(function, world_size, port, arguments), nprocs=world_size)
