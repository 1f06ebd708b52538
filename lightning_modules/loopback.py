"""Keep the sockets of a run on a single machine away from the network."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"

_stores: list[TCPStore] = []  # served as long as this process lives


@contextmanager
def loopback(trainer: Trainer) -> Iterator[None]:
    """Let the processes of a run on one machine talk over the loopback interface, within the block.

    Torch's store listens on all interfaces and asks nobody who he is. Here it gets a socket that is bound already, and
    the processes are told to connect to it, as they do to the store of torchrun. Where something else starts the
    processes (torchrun, SLURM) or names an address by ``MASTER_ADDR``, that decides where the store is.
    """
    before = dict(os.environ)
    if trainer.num_nodes == 1 and trainer.world_size > 1:
        _use_loopback(trainer)
    try:
        yield
    finally:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _use_loopback(trainer: Trainer) -> None:
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if "MASTER_ADDR" in os.environ or type(trainer.strategy.cluster_environment) is not LightningEnvironment:  # type: ignore[attr-defined]
        return
    server = socket.create_server((LOOPBACK, int(os.environ.get("MASTER_PORT", 0))))
    port = server.getsockname()[1]
    _stores.append(TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()))
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
