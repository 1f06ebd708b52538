"""Forward passes for the spans of concurrent requests."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from lightning_modules.batch import IGNORE_INDEX, unscored_token
from lightning_modules.functional.top_tokens import with_greedy
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.lockstep import any_rank
from lightning_modules.models.served.dialects import Scores, Span
from lightning_modules.scoring.document_scorer import is_out_of_memory
from lightning_modules.tasks.teacher_forcing import group_rows, padded_rows

_QUEUED_PASSES = 64
"""Forward passes that may wait in the queue; further requests are asked to come back."""

_IDLE_SECONDS = 0.05  # between checks for requests and signals, in which sharded processes agree on the next pass


class _Pending(NamedTuple):
    """A span that waits for its scores."""

    span: Span
    answer: "Future[Scores]"


class BatchingScorer:
    """Collects the spans of concurrent requests, and scores spans of similar length in one forward pass.

    Args:
        backbone: The model, in eval mode.
        max_batch_tokens: Limit of a pass of several spans, with padding. On CPU, each span has its own pass.
    """

    def __init__(self, backbone: Backbone, max_batch_tokens: int) -> None:
        self.backbone = backbone
        self.max_batch_tokens = 0 if backbone.device.type == "cpu" else max_batch_tokens
        self.max_queued_tokens = _QUEUED_PASSES * max_batch_tokens
        self.counts: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()

    @property
    def queued_tokens(self) -> int:
        """Number of tokens that wait."""
        return sum(len(each.span.ids) for each in self._pending)

    def submit(self, span: Span) -> "Future[Scores] | None":
        """Return the future scores of a span, or None if too many tokens wait already."""
        with self._changed:
            if self._pending and self.queued_tokens + len(span.ids) > self.max_queued_tokens:
                return None
            self._pending.append(_Pending(span, Future()))
            self._changed.notify()
            return self._pending[-1].answer

    def run(self, is_over: Callable[[], bool]) -> None:
        """Score spans until ``is_over`` and none waits. Ranks that share weights make all passes together."""
        while True:
            group = self._take()
            finished = is_over() and not group and not self._pending
            if not self.backbone.is_sharded:
                if finished:
                    return
                if group:
                    self._score(group)
            elif any_rank(bool(group), self.backbone.device):
                self._score(group)  # without spans, a pass of one token
            elif not any_rank(not finished, self.backbone.device):
                return

    def _take(self) -> list[_Pending]:
        """Return the oldest span and those that fit into its pass, after waiting a moment for one."""
        with self._changed:
            if not self._pending:
                self._changed.wait(_IDLE_SECONDS)
            if not self._pending:
                return []
            groups = group_rows([len(each.span.ids) for each in self._pending], self.max_batch_tokens)
            indices = next(group for group in groups if 0 in group)
            taken = [self._pending[index] for index in indices]
            self._pending = [each for index, each in enumerate(self._pending) if index not in set(indices)]
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]

    def _score(self, group: list[_Pending]) -> None:
        """Score spans in one pass, and answer their requests; if memory runs out, score each by itself."""
        started = time.monotonic()
        try:
            scores = self._pass([each.span for each in group])
        except (RuntimeError, MemoryError) as error:
            failure: Exception = error
            fatal = not is_out_of_memory(error) or self.backbone.is_sharded  # others wait for this process's shard
            if fatal or len(group) == 1:
                for each in group:
                    each.answer.set_exception(failure)
            if fatal:
                raise
            scores = []
        for each, result in zip(group, scores, strict=False):
            each.answer.set_result(result)
        self.counts["passes"] += 1
        self.counts["tokens"] += sum(len(each.span.ids) for each in group)
        self.counts["scored_tokens"] += sum(len(each.log_likelihood) for each in scores)
        self.counts["busy_milliseconds"] += round(1000 * (time.monotonic() - started))
        # After the `except` block, the error no longer keeps the tensors of the failed pass alive.
        for each in group if len(group) > 1 and not scores else []:
            self._score([each])

    @torch.no_grad()
    def _pass(self, spans: list[Span]) -> list[Scores]:
        """Make a forward pass, of one token without spans, and return the scores of each span."""
        if not spans:
            self.backbone(unscored_token(self.backbone.device))
            return []
        batch = padded_rows([span.ids for span in spans], self.backbone.device)
        for row, span in enumerate(spans):
            batch["labels"][row, : span.scored_from] = IGNORE_INDEX
        places = [slice(len(span.ids) - span.greedy, len(span.ids)) for span in spans]
        first_scored, head_fn = min(span.scored_from for span in spans), partial(with_greedy, places=places)
        scores, greedy = self.backbone(batch, first_scored=first_scored, head_fn=head_fn)
        rows = zip(scores.float().cpu().numpy(), greedy.int().cpu().numpy(), spans, places, strict=True)
        return [Scores(row[span.scored_from : place.stop], likeliest[place]) for row, likeliest, span, place in rows]
