"""Connection to the Hugging Face hub that fails soon without a network."""

import socket
import sys
import time
import urllib.request
from typing import Any

from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars

_RETRY_SECONDS = 1.0
_TIMEOUT_SECONDS = 10.0


def configure_hub() -> None:
    """Retry a hub that cannot be reached once instead of 5 times, and show bars of downloads in terminals only.

    `huggingface_hub`, transformers and datasets then use their caches, as with ``HF_HUB_OFFLINE=1``. Errors of a hub
    that answers are retried as before.
    """
    if not sys.stderr.isatty():  # a log file
        disable_progress_bars()  # also those of transformers
    client = get_session()
    tried: set[Any] = set()
    reached: set[Any] = set()

    def check_connection(request: Any) -> None:
        default_ports = {"https": 443, "http": 80}
        address = (request.url.host, request.url.port or default_ports[request.url.scheme])
        if address in reached:
            return
        if {"http", "https", "all"} & set(urllib.request.getproxies()):  # a proxy resolves names
            return
        try:
            socket.create_connection(address, timeout=_TIMEOUT_SECONDS).close()
            reached.add(address)
        except OSError as error:
            if address in tried:
                raise OfflineModeIsEnabled(f"{address[0]} cannot be reached: {error}.") from error
            tried.add(address)
            time.sleep(_RETRY_SECONDS)
            check_connection(request)

    hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], check_connection]}
    set_client_factory(lambda: type(client)(event_hooks=hooks, follow_redirects=True, timeout=None))
