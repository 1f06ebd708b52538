"""Requests to the Hugging Face hub that fail soon if the hub cannot be reached."""

import socket
import time
import urllib.request
from typing import Any

from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled

_RETRY_SECONDS = 1.0
_TIMEOUT_SECONDS = 10.0


class _Connection:
    """Check before a request that its host can be reached, until it was reached once."""

    def __init__(self) -> None:
        self._reached: set[str] = set()
        self._attempts = 2

    def check(self, request: Any) -> None:
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        if host in self._reached or urllib.request.getproxies():  # a proxy resolves the name
            return
        attempts, self._attempts = self._attempts, 1
        while attempts:
            attempts -= 1
            try:
                socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS).close()
                self._reached.add(host)
                return
            except OSError as error:
                if not attempts:
                    # The error of HF_HUB_OFFLINE, after which libraries use their caches.
                    raise OfflineModeIsEnabled(f"{host} cannot be reached: {error}.") from error
                time.sleep(_RETRY_SECONDS)


def fail_fast_offline() -> None:
    """Let `huggingface_hub`, transformers and datasets retry a hub that cannot be reached once, instead of 5 times.

    They then use their caches, as with ``HF_HUB_OFFLINE=1``. Errors of a hub that answers are retried as before.
    """
    client = get_session()
    hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], _Connection().check]}
    set_client_factory(lambda: type(client)(event_hooks=hooks, follow_redirects=True, timeout=None))
