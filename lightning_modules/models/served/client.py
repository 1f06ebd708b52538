"""Requests to one server, with a deadline for each request and a limit on the size of its reply."""

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from lightning_modules.models.loading.config import ServerConfig, is_served, read_key
from lightning_modules.models.served.dialects import AnswerError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BUSY = {408, 425, 429, 502, 503, 504}  # statuses of a server that cannot answer at the moment
_OF_THE_REQUEST = {400, 413, 422}  # .. that refuse one request, such as a document that is too long
_LIST_SECONDS = 60.0  # for a list of models, which even a busy server returns immediately
_REPLY_BYTES = 4 * 2**20  # of any reply
_TOKEN_BYTES = 1024  # of a reply for each token of the request; vLLM's has about 80 and the texts of two tokens
_QUOTED = 300  # characters of a reply in a message


@dataclass(eq=False)
class Unavailable(Exception):  # noqa: N818, not an error: it is handled by asking again
    """Raised if a server does not answer."""

    reason: str
    delay: float | None = None  # seconds to wait before the next attempt, if the server specifies them
    blamed: bool = True  # whether the request may be the reason


class Client:
    """Sends requests to a server at ``http(s)://HOST:PORT``."""

    def __init__(self, address: str, config: ServerConfig) -> None:
        served_address = address if is_served(address) else ""  # refuses one with a key
        try:
            url = urlsplit(served_address)
            is_valid = bool(url.hostname) and url.port != 0 and httpx2.URL(address).host != ""
        except (ValueError, httpx2.InvalidURL):  # for example a port out of range
            is_valid = False
        if not is_valid:
            raise ValueError(f"The address of a server must be http(s)://HOST:PORT, got '{address}'.")
        is_local = url.hostname in _LOOPBACK
        if url.scheme == "http" and not is_local and not config.allow_http:
            raise ValueError(
                f"The server '{address}' is on another machine, and http:// sends texts and keys unencrypted: use"
                " https://, or set `server.allow_http` to true in a network that you trust."
            )
        self._address = address
        self._config = config
        self._key = read_key(config.key_variable)
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._client = httpx2.AsyncClient(
            base_url=address,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=10.0),  # each request has a deadline
            limits=httpx2.Limits(max_connections=config.concurrency + 1),
            trust_env=not is_local,  # proxies and certificates of the environment are for other machines
        )
        self.close = self._client.aclose

    async def send(self, method: str, path: str, content: dict[str, Any] | None = None, tokens: int = 0) -> bytes:
        """Return the body of an answer with status 200 to a request, which is for a text of ``tokens`` or for a list.

        Raises:
            Unavailable: If the server cannot be reached, is busy or fails, or the reply is not complete in time.
            AnswerError: If the server refuses this text, or its reply is larger than any answer.
            ValueError: If the server refuses all requests, for example because of the key.
        """
        # A server can send one byte before each timeout of a read, so the deadline is for the whole reply.
        seconds = self._config.timeout if tokens else min(self._config.timeout, _LIST_SECONDS)
        limit = _REPLY_BYTES + _TOKEN_BYTES * tokens
        kind = AnswerError if tokens else ValueError
        body = bytearray()
        try:
            async with asyncio.timeout(seconds), self._client.stream(method, path, json=content) as response:
                # A small compressed body could fill the memory. An error page is only quoted.
                is_compressed = response.headers.get("Content-Encoding", "identity") != "identity"
                if is_compressed and response.status_code == 200:
                    raise self.refuse(f"sent a compressed reply to {method} {path}: turn compression off", kind)
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > limit:
                        raise self.refuse(f"sent a reply to {method} {path} of more than {limit:,} bytes", kind)
        except TimeoutError:
            raise Unavailable(
                f"no complete reply to {method} {path} within {seconds:g} s (increase `server.timeout` if it is slow)"
            ) from None
        except httpx2.TransportError as error:  # also an answer that is cut off
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise Unavailable(reason, blamed=not isinstance(error, httpx2.ConnectError)) from None
        if response.status_code != 200:
            self._raise_for_status(response, f"answered {method} {path} with status {response.status_code}", body)
        return bytes(body)

    def _raise_for_status(self, response: httpx2.Response, answer: str, body: bytearray) -> None:
        status = response.status_code
        if status not in (401, 403):  # whose bodies may repeat parts of the key
            answer += f": {quote(body)}"
        if status in _BUSY or status >= 500:
            wait = response.headers.get("Retry-After", "")
            delay = float(wait) if wait.isdecimal() else None
            raise Unavailable(self._hide_key(answer), delay, blamed=status not in _BUSY)
        if status in _OF_THE_REQUEST:
            raise self.refuse(answer, AnswerError)
        raise self.refuse(
            f"{answer}. Check the address, `server.dialect` and the key in the environment variable"
            f" {self._config.key_variable}"
        )

    def refuse(self, message: str, kind: type[ValueError] = ValueError) -> ValueError:
        """Return an error that names the server."""
        return kind(self._hide_key(f"The server {self._address} {message}."))

    def _hide_key(self, text: str) -> str:
        """Return a text without the key, which a server may repeat in its answer."""
        return text.replace(self._key, "***") if self._key else text


def quote(body: bytes | bytearray) -> str:
    """Return the beginning of a reply for a message."""
    return repr(body[:_QUOTED].decode("utf-8", errors="replace"))
