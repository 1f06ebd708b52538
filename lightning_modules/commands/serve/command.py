"""``longce serve`` as a command: model, port, certificate and signals."""

import logging
import os
import signal
import socket
import ssl
import threading
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import uvicorn

from lightning_modules.commands.serve.batching import BatchingScorer
from lightning_modules.commands.serve.config import ServeConfig
from lightning_modules.commands.serve.service import Service
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.identity import check_same_model, model_identity
from lightning_modules.models.loading import load_config, load_frozen
from lightning_modules.scoring.score import find_device
from lightning_modules.utilities.identity import combined_hash

_MAX_LENGTH = 1 << 20
"""Limit of a document in tokens, for models without a maximum length."""

_NUMERICS = ("model_config", "context_extension", "quantization")

_log = logging.getLogger(__name__)


def serve(config: ServeConfig) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C; requests that wait then are still answered.

    Under `longce launch` or torchrun, each process has its own port, counted from ``port``, and a copy of the model or,
    if ``sharded``, a shard.
    """
    key = config.read_key()
    if config.sharded and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ValueError("`sharded` needs several processes: run `longce launch --nproc_per_node N -- serve ..`.")
    rank = int(os.environ.get("RANK", "0"))
    device = find_device(config.device)
    if device.type == "cuda" and config.device == "auto":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    loading = config.model_loading()
    load_config(loading)
    _check_certificate(config)
    listener = _listen(config.host, config.port + rank if config.port else 0)
    identity = model_identity(loading)
    backbone = _load(config, device)
    backbone.check_length(config.max_length or 0)  # learned positions would end the server later
    check_same_model(identity, loading)
    numerics = {name: value for name, value in asdict(loading).items() if name in _NUMERICS}
    dtype = str(backbone.base_model.dtype)
    numerics_hash = combined_hash([numerics, dtype, backbone.attention])[:16]
    scorer = BatchingScorer(backbone, config.max_batch_tokens)
    limit = getattr(backbone.base_model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    full_identity, max_length = f"{identity}:{numerics_hash}", config.max_length or limit or _MAX_LENGTH
    app = Service(scorer, config.model, full_identity, key=key, max_length=max_length).app
    files: dict[str, Any] = {"ssl_certfile": config.certificate, "ssl_keyfile": config.certificate_key}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=60, **files))
    _serve_until_signal(server, listener, scorer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(config: ServeConfig, device: torch.device) -> Backbone:
    if not config.sharded:
        return load_frozen(config.model_loading(), device)
    from lightning_modules.training.fsdp import load_sharded_frozen  # imports Lightning

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return load_sharded_frozen(config.model_loading(), device)


def _check_certificate(config: ServeConfig) -> None:
    """Raise a ``ValueError`` for a certificate that cannot be used, before the model is loaded."""
    if config.certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.certificate_key)
        except OSError as error:
            raise ValueError(
                f"`certificate` '{config.certificate}' and `certificate_key` '{config.certificate_key}' cannot be used"
                f" ({error.strerror or error}): they must be PEM files that belong together."
            ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket at an address, before the model is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueError(
            f"The server cannot listen on {host}:{port} ({reason}): choose another `port` or `host`."
        ) from error


def _serve_until_signal(server: uvicorn.Server, listener: socket.socket, scorer: BatchingScorer) -> None:
    """Answer requests in another thread, and score in this one, until a signal."""

    def stop(*_: object) -> None:
        server.should_exit = True  # no further requests are accepted, and those that wait are answered

    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in signals]
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    scheme, (host, port) = "https" if server.config.ssl_certfile else "http", listener.getsockname()[:2]
    _log.info("Serving at %s://%s:%d (Ctrl-C stops it).", scheme, f"[{host}]" if ":" in host else host, port)
    try:
        scorer.run(lambda: not thread.is_alive())
    finally:
        stop()
        thread.join(timeout=60)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
