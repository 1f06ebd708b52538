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

_stores: list[TCPStore] = []  # kept alive, because they serve as long as they exist


@contextmanager
def loopback(trainer: Trainer) -> Iterator[None]:
    """Make the processes of a run on one machine communicate over the loopback interface, within the block.

    By default, torch's store listens on all interfaces without authentication. Here it gets a socket that is already
    bound, and the processes connect to it as to the store of torchrun. ``MASTER_ADDR`` is ignored. If another program
    starts the processes (torchrun, SLURM), that program also places the store.
    """
    names = [f"{backend}_SOCKET_IFNAME" for backend in ("GLOO", "NCCL")]
    names += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    before = {name: os.environ.get(name) for name in names}
    if trainer.num_nodes == 1 and trainer.world_size > 1:
        _use_loopback(trainer)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _use_loopback(trainer: Trainer) -> None:
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    if type(environment) is not LightningEnvironment or environment.creates_processes_externally:
        return
    wanted = os.environ.get("MASTER_PORT", "0")
    try:
        server = socket.create_server((LOOPBACK, int(wanted)))
    except (ValueError, OverflowError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a port number"
        raise ValueError(
            f"`MASTER_PORT` = {wanted!r} cannot be used: {reason}. Unset it to use any free port, or set another number"
            " up to 65535."
        ) from error
    port = server.getsockname()[1]
    _stores.append(TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()))
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
