"""Keep the sockets of a run on a single machine away from the network."""

import os
import socket
import sys

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"

_stores: list[TCPStore] = []  # served as long as this process lives


def use_loopback(trainer: Trainer) -> None:
    """Let the processes of a run that Lightning starts on one machine meet at a store that only this machine reaches.

    Torch's store listens on all interfaces and asks nobody who he is. Here it gets a socket that is bound already, and
    the processes are told to connect to it, as they do to the store of torchrun. Where something else starts the
    processes (torchrun, SLURM) or names an address by ``MASTER_ADDR``, that decides.
    """
    if trainer.num_nodes > 1 or trainer.world_size == 1:
        return
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if "MASTER_ADDR" in os.environ or type(trainer.strategy.cluster_environment) is not LightningEnvironment:  # type: ignore[attr-defined]
        return
    server = socket.create_server((LOOPBACK, int(os.environ.get("MASTER_PORT", 0))))
    port = server.getsockname()[1]
    _stores.append(TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()))
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
