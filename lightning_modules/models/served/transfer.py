"""One request to a server, which ends whatever the server does: it has a deadline, and its reply a largest size."""

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2


class Reply(NamedTuple):
    """What a server sent: the status, ``Retry-After`` or an empty text, and the decoded body."""

    status: int
    retry_after: str
    body: bytes


class BadReplyError(Exception):
    """Raised for a reply that is larger than any answer, or cannot be decoded; asking again would not help."""


@dataclass(eq=False)
class Unavailable(Exception):  # noqa: N818, not an error: it is handled by asking again
    """Raised if a server does not answer."""

    reason: str
    delay: float | None = None  # seconds after which the server wants to be asked again, if it said so
    blamed: bool = False  # whether the request may be the reason


async def request(
    client: httpx2.AsyncClient, method: str, path: str, *, seconds: float, max_bytes: int, **options: Any
) -> Reply:
    """Send a request, and return the whole reply.

    Args:
        client: The client, whose own timeouts are for single reads: a server can send one byte before each of them.
        method: Method of HTTP.
        path: Path below the client's address.
        seconds: Time for all of it, with connecting and the server's queue.
        max_bytes: Largest size of the decoded body. A small compressed body could fill the memory.
        **options: Further arguments of ``client.stream``.

    Raises:
        Unavailable: If the connection fails, or the reply is not complete in time.
        BadReplyError: If the body is larger, or cannot be decoded.
    """
    try:
        async with asyncio.timeout(seconds), client.stream(method, path, **options) as response:
            decode, body = _decoder(response.headers.get("Content-Encoding", "identity")), bytearray()
            async for part in response.aiter_raw():
                body += decode(part, max_bytes + 1 - len(body))
                if len(body) > max_bytes:
                    raise BadReplyError(f"has more than {max_bytes:,} bytes, which no answer needs")
            return Reply(response.status_code, response.headers.get("Retry-After", ""), bytes(body))
    except TimeoutError:
        reason = f"no complete reply to {method} {path} within {seconds:g} s (increase `server.timeout` if it is slow)"
        raise Unavailable(reason, blamed=True) from None
    except httpx2.TransportError as error:  # also an answer that is cut off
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise Unavailable(reason, blamed=not isinstance(error, httpx2.ConnectError)) from None


def _decoder(encoding: str) -> Callable[[bytes, int], bytes]:
    """Return a function that decodes a part of a body to at most so many bytes."""
    if encoding == "identity":
        return lambda part, _: part
    if encoding not in ("gzip", "deflate"):
        raise BadReplyError(f"is encoded as '{encoding}', although it was asked for without encoding")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # with the header of either

    def decode(part: bytes, limit: int) -> bytes:
        try:
            return decompressor.decompress(part, limit)
        except zlib.error as error:
            raise BadReplyError(f"is not {encoding} ({error})") from None

    return decode
