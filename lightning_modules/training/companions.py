"""The other processes of a run: none waits long for one that is gone."""

import hmac
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_modules.utilities.loopback import LOOPBACK

GATHERING = 300.0
"""Seconds within which all processes of a run must have started: some may read their packages from a slow disk."""

PATIENCE = 40.0
"""Seconds of waiting at the start after which a process says for what, and looks for the first one."""

GRACE = 10.0
"""Seconds a process has to fail by itself, with a better message, after another one has ended."""

_GOODBYE = b"."
_REMEDY = "its own output says why. Then run the same command again, `fit` with `--ckpt_path FOLDER` of the run."

_log = logging.getLogger(__name__)


class Companions(Callback):
    """Ends a process soon after another one of the run has died, wherever it is.

    NCCL waits for a dead process until a timeout of half an hour, and a process that computes something for itself
    notices nothing: when it scores documents as the evaluator. Here each has a connection to the first one, which the
    system closes however a process ends; that of a machine that is gone counts as closed after a minute. Nobody is
    timed: who is slow, stopped or swapped out is waited for.
    """

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []
        self._left = threading.Event()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or self._connections:
            return
        if trainer.is_global_zero:
            with socket.create_server(
                (LOOPBACK if trainer.num_nodes == 1 else "", 0), backlog=trainer.world_size
            ) as server:
                token = secrets.token_bytes(16)
                trainer.strategy.broadcast((server.getsockname()[1], token))
                self._connections = _accepted(server, token, trainer.world_size - 1)
        else:
            port, token = trainer.strategy.broadcast((0, b""))
            address = LOOPBACK if trainer.num_nodes == 1 else os.environ["MASTER_ADDR"]  # where they have met
            self._connections = _connected(address, port, token)
        for connection in self._connections:
            _keep_alive(connection)
        self._left = threading.Event()
        arguments = (list(self._connections), self._left)
        threading.Thread(target=_wait, args=arguments, daemon=True, name="companions").start()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # on which all have agreed
            self._leave()

    def _leave(self) -> None:
        self._left.set()
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_GOODBYE)
                connection.shutdown(socket.SHUT_WR)
        self._connections = []


def _accepted(server: socket.socket, token: bytes, count: int) -> list[socket.socket]:
    """Connections of the others; whoever does not know the token is none of them."""
    server.settimeout(GRACE)
    found: list[socket.socket] = []
    with suppress(TimeoutError):
        while len(found) < count:
            connection, _ = server.accept()
            if _knows(connection, token):
                found.append(connection)
            else:
                connection.close()
    return found


def _knows(connection: socket.socket, token: bytes) -> bool:
    connection.settimeout(GRACE)
    with suppress(OSError):  # a stranger may say nothing, or hang up
        return hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token)
    return False


def _connected(address: str, port: int, token: bytes) -> list[socket.socket]:
    """The connection to the first process; none if a firewall forbids it."""
    try:
        connection = socket.create_connection((address, port), timeout=GRACE)
        connection.sendall(token)
    except OSError as error:
        _log.warning("No connection to watch %s by (%s): if a process dies, others may wait for it.", address, error)
        return []
    return [connection]


def _keep_alive(connection: socket.socket) -> None:
    """Let the system ask whether the other machine is still there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, seconds in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)


def _wait(connections: list[socket.socket], left: threading.Event) -> None:
    """Until all have said goodbye; ends this process if one is gone without, unless this one has left, too."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not (_said_goodbye(key.fileobj) or left.wait(GRACE)):
                    _end("Another process of the run has ended")
                selector.unregister(key.fileobj)
    for connection in connections:
        connection.close()


def _said_goodbye(connection: Any) -> bool:
    try:
        return bool(connection.recv(1) == _GOODBYE)
    except OSError:
        return False


@contextmanager
def gathering(trainer: Trainer) -> Iterator[None]:
    """Give the processes of a run so long to find each other; later they may wait as long as it takes.

    A process ends if others have not come after `GATHERING` seconds. On a single node the first process is there before
    the others, or their launcher is: if nobody listens after `PATIENCE` seconds, it is gone. Processes that this one
    forks or spawns (``ddp_fork``, ``ddp_spawn``) run elsewhere than here, and their parent sees them end.
    """
    done = threading.Event()
    if trainer.world_size > 1 and not isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        follows = trainer.local_rank > 0 and trainer.num_nodes == 1
        threading.Thread(target=_gather, args=(done, follows), daemon=True, name="gathering").start()
    try:
        yield
    finally:
        done.set()


def _gather(done: threading.Event, follows: bool) -> None:
    if (reason := _waited_in_vain(done, follows)) is not None:
        _end(reason)


def _waited_in_vain(done: threading.Event, follows: bool) -> str | None:
    """Why there is nothing to wait for any more; None when the processes have found each other."""
    begin, said = time.monotonic(), False
    while not (dist.is_initialized() or done.wait(1)):
        waited = time.monotonic() - begin
        if waited > GATHERING:
            return f"Not all processes of the run have started within {GATHERING:.0f} s: one may have ended"
        if waited > PATIENCE and not said:
            said = True
            if follows and not _first_is_there():
                return "The first process of the run has ended"
            _say(f"Waiting for other processes of the run to start, until {GATHERING:.0f} s are over.")
    return None


def _first_is_there() -> bool:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=GRACE).close()
    except (OSError, KeyError):
        return False
    return True


def _end(reason: str) -> None:
    _say(f"error: {reason}: {_REMEDY}")
    os._exit(1)  # the main thread may wait where no exception reaches it


def _say(message: str) -> None:
    os.write(2, f"longce: {message}\n".encode())
