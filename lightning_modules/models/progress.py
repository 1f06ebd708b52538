"""Progress of forward passes over documents, in tokens and layer by layer: on a CPU, a pass may take minutes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from torch import nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_modules.functional import ShortContext, short_context_windows
from lightning_modules.utilities.progress import LOG_SECONDS, progress_bar

SECONDS = 3.0
"""Nothing is shown for less."""

Document = TypeVar("Document")

_bar: ContextVar[tqdm | None] = ContextVar("_bar", default=None)


def report_progress(decoder: nn.Module) -> None:
    """Let each forward pass of a model advance the bar of `show_progress`, if there is one."""
    # The first list of modules of a decoder is that of its layers.
    layers = next((module for module in decoder.modules() if isinstance(module, nn.ModuleList)), nn.ModuleList())
    for layer in layers:
        layer.register_forward_hook(partial(_advance, layers=len(layers)))


def _advance(_module: nn.Module, _args: Any, output: Any, *, layers: int) -> None:
    bar = _bar.get()
    if bar is not None:
        # ``[B, T, D]``; some layers also return attention weights.
        hidden = output[0] if isinstance(output, tuple | list) else output
        # Rounded down to a binary fraction, because tqdm warns if the sum of all layers exceeds the total.
        bar.update(math.floor(2**20 * hidden.shape[:-1].numel() / layers) / 2**20)


@contextmanager
def show_progress(documents: Sequence[Document], name: str, tokens: Sequence[int]) -> Iterator[Iterator[Document]]:
    """Yield an iterator over documents that shows how many tokens of their forward passes are done, and the time left.

    Args:
        documents: Documents to iterate over; a document is done when the next one is requested.
        name: Name of the task, such as ``evaluator``.
        tokens: Approximate number of tokens in the forward passes over each document.
    """
    bar = progress_bar(name, unit=" tokens", total=sum(tokens), leave=False, delay=SECONDS)

    def iterate() -> Iterator[Document]:
        for number, (document, end) in enumerate(zip(documents, accumulate(tokens), strict=True), start=1):
            if len(documents) > 1:
                bar.set_description(f"{name}, document {number} of {len(documents)}", refresh=False)
            yield document
            bar.update(end - bar.n)  # scores were stored, a server has computed them, or there were other windows

    with advance(bar):
        yield iterate()


@contextmanager
def advance(bar: tqdm, *, redirect: bool = True) -> Iterator[None]:
    """Advance a bar by the tokens of forward passes, and close it at the end; log messages get separate lines."""
    previous = _bar.set(bar)
    try:
        with logging_redirect_tqdm() if redirect else nullcontext():
            yield
    finally:
        _bar.reset(previous)
        bar.close()


def show_batch(name: str) -> AbstractContextManager[None]:
    """Show how many tokens of a batch's forward passes are done, if they take more than half a minute."""
    # Messages are not redirected: handlers that a callback adds to the loggers within a batch would be lost.
    return advance(progress_bar(name, unit=" tokens", leave=False, delay=LOG_SECONDS), redirect=False)


def count_tokens(length: int, short_context: ShortContext) -> int:
    """Return the tokens of the long pass and of the short windows of a document with ``length`` tokens."""
    windows = short_context_windows([0, length], short_context)
    return length + sum(window.stop - window.start for window in windows)
