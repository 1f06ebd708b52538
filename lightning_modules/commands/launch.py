"""``longce launch``: start the processes of a run with torchrun's agent, and restart them after a crash."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from typing_extensions import override

from lightning_modules.utilities.orphans import LAUNCHER

_LOOPBACK = "127.0.0.1"
_USER_ERROR = 2
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class Agent(LocalElasticAgent):
    """Torchrun's agent that does not restart after a user error, and reports whether a stop was clean."""

    def stopped_cleanly(self) -> bool:
        """Return whether every process of this machine saved and exited with status 0 after a signal."""
        processes = self._worker_processes()
        return bool(processes) and all(process.poll() == 0 for process in processes)

    def _worker_processes(self) -> list[subprocess.Popen[bytes]]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    @override
    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if _is_user_error(result.failures.values()):
            self._remaining_restarts = 0
        return result

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Signal the processes to save and stop, and kill those that still run after the timeout.

        Torchrun would also signal their data loader workers, and a dead worker is an error before anything is saved.
        Under SLURM, SIGUSR1 also requeues the job.
        """
        requeues = death_sig == signal.SIGUSR1 and "SLURM_JOB_ID" in os.environ
        running = [process for process in self._worker_processes() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGUSR1 if requeues else signal.SIGTERM)
        deadline = time.monotonic() + timeout
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        super()._shutdown(signal.SIGKILL, timeout)


def launch(words: Sequence[str], options: Namespace) -> int:
    """Run a ``longce`` command, given by its words, in several processes, and return the exit status.

    The status is 0 after success or a clean stop, 2 for a user error, above 128 for a signal, and 1 otherwise.
    """
    # Torch 2.13: without this variable, restarted processes read the addresses of the crashed ones from the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS
    os.environ[LAUNCHER] = str(os.getpid())
    alone = options.nnodes == 1
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{_LOOPBACK}:0" if alone else options.rdzv_endpoint,
        run_id=uuid.uuid4().hex if alone else os.environ.get("SLURM_JOB_ID", "longce"),
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr=_LOOPBACK if alone else None,
    )
    spec = WorkerSpec(
        role="longce",
        local_world_size=options.nproc_per_node,
        entrypoint=sys.executable,
        args=("-P", "-m", "lightning_modules.commands.cli.main", *words),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=options.max_restarts,
        local_addr=parameters.local_addr,
    )
    agent = Agent(spec, DefaultLogsSpecs(), shutdown_timeout=options.shutdown_timeout)
    try:
        result = agent.run()
        failures = list(result.failures.values()) if result is not None else []
    except SignalException as stopped:
        return 0 if agent.stopped_cleanly() else 128 + stopped.sigval
    spec.rdzv_handler.shutdown()
    for failure in failures:
        killed = failure.exitcode < 0
        ending = f"was killed by {failure.signal_name()}" if killed else f"exited with status {failure.exitcode}"
        sys.stderr.write(f"longce: error: process {failure.local_rank} (pid {failure.pid}) {ending}.\n")
    if not failures:
        return 0
    if _is_user_error(failures):
        return _USER_ERROR
    sys.stderr.write("longce: see its output above. To resume `fit`, add `--ckpt_path RUN_FOLDER` to the command.\n")
    return 1


def _is_user_error(failures: Iterable[ProcessFailure]) -> bool:
    """Return whether the first process to fail had a user error; the others fail because of it."""
    first = min(failures, key=lambda failure: failure.timestamp, default=None)
    return first is not None and first.exitcode == _USER_ERROR
