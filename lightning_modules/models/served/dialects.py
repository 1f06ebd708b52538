"""Requests to servers, and parsers of their answers; an unexpected answer is refused."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_LOG_LIKELIHOOD = -5000.0
"""No model gives a token a log-likelihood below this, in nats; servers replace ``-inf`` by -9999."""

MAX_LOG_LIKELIHOOD = 1e-4
"""Largest log-likelihood that rounding can cause, in nats."""


class AnswerError(ValueError):
    """Raised for an answer without usable log-likelihoods; asking again would not help."""


class TokenSpan(NamedTuple):
    """Tokens that a server reads, and the values that it should return for them."""

    ids: NDArray[np.int32]
    scored_from: int  # index of the first token whose log-likelihood is returned, 1 or more
    greedy: int = 0  # number of last positions for which the likeliest tokens are also returned


class Scores(NamedTuple):
    """Log-likelihoods of a span's scored tokens in nats, and the likeliest tokens in the places of the last ones."""

    log_likelihood: NDArray[np.float32]
    greedy: NDArray[np.int32]


class Vllm:
    """vLLM's ``/v1/completions`` with ``prompt_logprobs``, which are the float32 log-softmax of each prompt token."""

    path = "/v1/completions"
    field = "prompt_logprobs"

    def body(self, span: TokenSpan, model: str) -> dict[str, Any]:
        """Return the JSON of the request for the scores of a span."""
        return {
            "model": model,
            "prompt": span.ids.tolist(),
            "max_tokens": 1,  # vLLM must generate a token; it is ignored
            "temperature": 0,
            "prompt_logprobs": int(span.greedy > 0),
        }

    def find(self, span: TokenSpan, answer: Any) -> Scores:
        """Return the scores in an answer; other answers may raise any error of their parsing."""
        (choice,) = answer["choices"]
        first, *entries = choice["prompt_logprobs"]
        if first is not None:
            raise ValueError("the first token has no context, so the values are shifted")
        values = []
        # A token that is missing from its entry raises a KeyError: the values would belong to other tokens.
        for token, entry in zip(span.ids[1:], entries, strict=True):
            values.append(entry[str(token)]["logprob"])
        greedy = []
        # An entry has the prompt's token, and the likeliest one if that is another.
        for entry in entries[len(entries) - span.greedy :]:
            if all(candidate["rank"] != 1 for candidate in entry.values()):
                raise ValueError("no token has rank 1")
            greedy.append(_find_greedy((candidate["logprob"], int(token)) for token, candidate in entry.items()))
        return _make_scores(span, values[span.scored_from - 1 :], greedy)


class Sglang:
    """SGLang's ``/generate`` with ``return_logprob``, whose values begin one token after ``logprob_start_len``."""

    path = "/generate"
    field = "meta_info.input_token_logprobs"

    def body(self, span: TokenSpan, model: str) -> dict[str, Any]:
        """Return the JSON of the request for the scores of a span."""
        return {
            "input_ids": span.ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": span.scored_from - 1,
            "top_logprobs_num": int(span.greedy > 0),
        }

    def find(self, span: TokenSpan, answer: Any) -> Scores:
        """Return the scores in an answer; other answers may raise any error of their parsing."""
        pairs = [(value, token) for value, token, *_ in answer["meta_info"]["input_token_logprobs"]]
        tokens = [token for _, token in pairs]
        if tokens != span.ids[span.scored_from - 1 :].tolist() or pairs[0][0] is not None:
            raise ValueError("they belong to other tokens than those that were sent")
        greedy = []
        if span.greedy:
            tops = answer["meta_info"]["input_top_logprobs"][-span.greedy :]
            for own, top in zip(pairs[-span.greedy :], tops, strict=True):
                greedy.append(_find_greedy([own, (top[0][0], top[0][1])]))
        return _make_scores(span, [value for value, _ in pairs[1:]], greedy)


DIALECTS: dict[str, Vllm | Sglang] = {"vllm": Vllm(), "sglang": Sglang()}
"""Protocols by their name in settings, which is also the owner that the server reports for its models."""


def _find_greedy(candidates: Iterable[tuple[float, int]]) -> int:
    """Return the likeliest token of pairs of log-likelihood and id; of equally likely ones the first, like argmax."""
    # Pairs of the negative value and the id sort as argmax chooses.
    return min((-value, token) for value, token in candidates)[1]


def _make_scores(span: TokenSpan, values: Sequence[Any], greedy: Sequence[int]) -> Scores:
    """Return scores of a span; raise an error if they are missing, are not numbers, or are impossible."""
    scores = Scores(np.asarray(values, np.float32), np.asarray(greedy, np.int32))
    count = len(span.ids) - span.scored_from
    if len(values) != count or len(greedy) != span.greedy or (scores.greedy < 0).any():
        raise ValueError(f"{len(values)} values for {count} tokens, {len(greedy)} greedy for {span.greedy}")
    # NaN compares as false.
    is_possible = (scores.log_likelihood <= MAX_LOG_LIKELIHOOD) & (scores.log_likelihood >= MIN_LOG_LIKELIHOOD)
    if not is_possible.all():
        raise ValueError(f"{values[int(is_possible.argmin())]} is not a log-likelihood")
    return scores
