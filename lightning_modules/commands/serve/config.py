"""Settings of `longce serve`; importable without torch."""

from dataclasses import dataclass
from typing import Any

from lightning_modules.models.config import LoadingOptions, ModelConfig, read_key

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeConfig(LoadingOptions):
    """Settings of `longce serve`.

    Args:
        model: Hub id or local folder of the model, or local folder of adapters (`longce export`).
        host: Address to listen on. Other machines can reach ``0.0.0.0``, which needs a key.
        port: Port to listen on; 0 is any free one. With several processes, each adds its rank.
        key_variable: Name of the environment variable that has the key, which clients must send.
        certificate: PEM file of the server's certificate, to serve https.
        certificate_key: PEM file of the certificate's private key.
        max_batch_tokens: Maximum number of tokens, with padding, in a forward pass of several documents or windows.
        max_length: Maximum number of tokens of a document; by default the model's positions.
        sharded: Shard the model across all processes (FSDP2) instead of loading a copy in each.
        revision: Branch, tag or commit on the hub.
        model_config: Values that override the model's config, such as ``rope_parameters``.
        context_extension: Method to extend the model's context, as for `longce fit`.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: weights in 4 or 8 bits.
        device: Device such as ``cuda:0`` or ``cpu``; ``auto`` is a GPU for each process, or the CPU.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    key_variable: str = "LONGCE_API_KEY"
    certificate: str | None = None
    certificate_key: str | None = None
    max_batch_tokens: int = 32_768
    max_length: int | None = None
    sharded: bool = False
    revision: str | None = None
    model_config: dict[str, Any] | None = None
    context_extension: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if not (0 <= self.port < 2**16 and self.max_batch_tokens > 0 and (self.max_length or 2) > 1):
            raise ValueError(
                "`port` must be from 0 to 65535, `max_batch_tokens` 1 or more and `max_length` 2 or more, got"
                f" {self.port}, {self.max_batch_tokens} and {self.max_length}."
            )
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("`certificate` and `certificate_key` belong together: set both, or none for http.")

    def model_loading(self) -> ModelConfig:
        """Return the settings to load the model."""
        names = ("model_config", "context_extension", "revision", "quantization")
        return self.loading(self.model, **{name: getattr(self, name) for name in names})

    def read_key(self) -> str:
        """Return the key; raise a ``ValueError`` if other machines could use the server without one."""
        key = read_key(self.key_variable)
        if not key and self.host not in _LOOPBACK:
            raise ValueError(
                f"`host` '{self.host}' can be reached by other machines: set the environment variable"
                f" {self.key_variable} to a key, or serve on 127.0.0.1."
            )
        return key
