"""Run a function in several processes over gloo."""

import os
import socket
from datetime import timedelta
from multiprocessing import connection
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.forks import enter, forks, start


def _entry(rank, environment, function, world_size, port, arguments):
    enter({**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # Processes that do not do the same wait for each other: a failure, not a hang.
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=2))
    try:
        function(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()


def run_distributed(function, *arguments, world_size=2):
    """``function(rank, world_size, *arguments)`` in each of ``world_size`` processes; its failure fails the test."""
    forks()  # starts the server
    passed = (dict(os.environ), function, world_size, find_port(), arguments)
    context = mp.start_processes(_entry, args=passed, nprocs=world_size, join=False, start_method="forkserver")
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:  # alive after a timeout only
            process.kill()


def run_like_torchrun(function, *arguments, log, world_size=2):
    """``function(*arguments)`` in processes with the variables of torchrun, which write what they print to a file."""
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    processes = []
    for rank in range(world_size):
        with mock.patch.dict(os.environ, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
            processes.append(start(function, *arguments, out=log))
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        for sentinel in connection.wait(list(waiting)):
            ended = waiting.pop(sentinel)
            ended.join()
            if ended.exitcode:
                for other in waiting.values():  # like torchrun, because they would wait for it
                    other.kill()
    assert [process.exitcode for process in processes] == [0] * world_size, log.read_text()[-3000:]


def find_port():
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
