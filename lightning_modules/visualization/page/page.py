"""Self-contained HTML page of a document's tokens, without external resources or other scripts than its own."""

import html
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_modules.functional import long_perplexity
from lightning_modules.scoring.key_tokens import Tokens, evaluator_key_tokens, match_tokens
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.page.alternatives import Alternatives
from lightning_modules.visualization.page.payload import (
    STEPS_PER_NAT,
    alternative_arrays,
    numbered,
    pack,
    span_arrays,
    utf8,
)
from lightning_modules.visualization.report import read_resource, render

_SCRIPTS = ("data.js", "key_tokens.js", "blocks.js", "card.js", "charts.js", "main.js")


class ModelScores(NamedTuple):
    """A model that is evaluated on the key tokens, with its ``[M]`` tokens of the document.

    Log-likelihoods are float32 nats given all preceding tokens; the first ``unscored`` are not scored. ``key`` marks
    its key tokens, and ``provenance`` identifies its content and numerics for readers.
    """

    name: str
    tokens: Tokens
    log_likelihood: Tensor
    key: Tensor
    provenance: str = ""
    unscored: int = 1

    def perplexities(self) -> tuple[float, float]:
        """Return LongPPL and perplexity."""
        return perplexities(self.log_likelihood, self.key, self.unscored)


@dataclass(repr=False)
class Inspection:
    """HTML page of a document with an evaluator's scores of each token.

    A notebook displays it. The page has sliders for the thresholds: key tokens have a long-short difference above
    ``alpha`` and a long-context log-likelihood above ``beta``, in nats. ``token_texts`` has the text of each token that
    the page names, by id; ``models`` are evaluated on the key tokens. ``provenance`` identifies the evaluator's content
    and numerics for readers.
    """

    name: str
    text: str
    evaluator: str
    scores: TokenScores
    token_texts: dict[int, str]
    alpha: float = 2.0
    beta: float = -2.0
    alternatives: Alternatives | None = None
    models: Sequence[ModelScores] = ()
    provenance: str = ""

    def html(self) -> str:
        """Return the page."""
        scripts = "".join(read_resource(f"page/{name}") for name in _SCRIPTS)
        script = f"(() => {{\n'use strict';\n{scripts}}})();"
        alternatives: dict[str, np.ndarray[Any, Any]] = {}
        if self.alternatives is not None:
            alternatives = alternative_arrays(self.alternatives, self._shown_ids, self._first_short)
        return render(
            "page/page.html",
            script=script,
            style=read_resource("theme.css") + read_resource("page/page.css"),
            scores=pack(self._script_arrays()),
            alternatives=pack(alternatives),
            **self._page_texts(),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically."""
        write_atomically(Path(path), self.html().encode("utf-8", errors="replace"))
        return Path(path)

    def summary(self) -> str:
        """Return the figures of the page in one line."""
        shown = self._page_texts()
        parts = [f"{shown['tokens']} tokens", f"{shown['key_tokens']} key tokens ({shown['share']})"]
        parts += [f"LongPPL {shown['longppl']}", f"perplexity {shown['perplexity']}"]
        parts += ["{name}: LongPPL {longppl}, perplexity {perplexity}".format(**model) for model in shown["models"]]
        return f"{self.name}: {', '.join(parts)}"

    def _repr_html_(self) -> str:
        """Return a sandboxed frame that may only run its script."""
        return (
            '<iframe sandbox="allow-scripts" width="100%" height="760" style="border: 1px solid #8884; border-radius:'
            f' 8px" srcdoc="{html.escape(self.html())}"></iframe>'
        )

    @property
    def _first_short(self) -> int:
        """Index of the first token whose short context is shorter than the long one."""
        return min(self.scores.short_context.window_length, len(self.scores.long))

    def _page_texts(self) -> dict[str, Any]:
        scores = self.scores
        models = []
        for model in self.models:
            longppl, perplexity = map(_format_perplexity, model.perplexities())
            # A file or folder is known by its last name, as long as no other model has it.
            numbers = {"longppl": longppl, "perplexity": perplexity, "short_name": self._shorten(model.name)}
            models.append({"name": model.name, "provenance": model.provenance, **numbers})
        key = evaluator_key_tokens(scores, alpha=self.alpha, beta=self.beta)
        longppl, perplexity = map(_format_perplexity, perplexities(scores.long, key, scores.unscored))
        short_context = scores.short_context
        longest_short = short_context.window_length - 1
        return {
            "name": self.name,
            "evaluator": self.evaluator,
            "provenance": self.provenance,
            "context_length": f"{short_context.context_length:,}",
            "stride": f"{short_context.stride:,}",
            "longest_short": f"{longest_short:,}",
            "alpha": f"{self.alpha:g}",
            "beta": "" if self.beta == -math.inf else f"{self.beta:g}",
            "tokens": f"{len(key):,}",
            "key_tokens": f"{int(key.sum()):,}",
            "share": f"{100 * int(key.sum()) / max(len(key) - scores.unscored, 1):.2f}%",
            "longppl": longppl,
            "perplexity": perplexity,
            "models": models,
        }

    def _shorten(self, name: str) -> str:
        short_names = [_last_name(model.name) for model in self.models]
        short_name = _last_name(name)
        return short_name if short_names.count(short_name) == 1 else name

    def _script_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return everything that the script needs to show the document and to count key tokens."""
        scores = self.scores
        vocabulary = self._shown_ids
        advance, length = span_arrays(self.text, scores.offsets)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "facts": utf8(json.dumps(self._script_settings())),
            "text": utf8(self.text),
            "vocabulary": utf8(json.dumps([self.token_texts[index] for index in vocabulary.tolist()])),
            "token": numbered(vocabulary, scores.token_ids),
            "long": scores.long.numpy(),
            "short": scores.short.numpy(),
            "advance": advance,
            "length": length,
        }
        for number, model in enumerate(self.models):
            advance, length = span_arrays(self.text, model.tokens.offsets)
            arrays[f"model_{number}_advance"] = advance
            arrays[f"model_{number}_length"] = length
            arrays[f"model_{number}_long"] = model.log_likelihood.numpy()
        return arrays

    def _script_settings(self) -> dict[str, Any]:
        alternatives = 0
        if self.alternatives is not None:
            alternatives = self.alternatives.long.token_ids.shape[-1]
        models = []
        for model in self.models:
            name = self._shorten(model.name)
            models.append({"name": name, "same_tokens": self._same_tokens(model)})
        return {
            "context_length": self.scores.short_context.context_length,
            "stride": self.scores.short_context.stride,
            "first_short": self._first_short,
            "unscored": self.scores.unscored,
            "alpha": self.alpha,
            "beta": None if self.beta == -math.inf else self.beta,
            "alternatives": alternatives,
            "steps_per_nat": STEPS_PER_NAT,
            "models": models,
        }

    def _same_tokens(self, model: ModelScores) -> list[int] | None:
        """Return the range of the evaluator's tokens that a model shares, and the model's index of the first one."""
        own = Tokens(self.scores.token_ids, self.scores.offsets)
        same = match_tokens(own, model.tokens)
        if same is None:
            return None
        return [same[0].start, same[0].stop, same[1].start]

    @cached_property
    def _shown_ids(self) -> Tensor:
        """Ascending ``[M]`` ids of the tokens that the page names."""
        shown = self.scores.token_ids
        if self.alternatives is not None:
            shown = torch.cat([shown, self.alternatives.all_token_ids()])
        return shown.unique()


def _last_name(model: str) -> str:
    """Return the name of a file or folder without its path and suffix."""
    if "/" not in model:
        return model
    return Path(model).stem


def perplexities(log_likelihood: Tensor, key: Tensor, unscored: int = 1) -> tuple[float, float]:
    """Return LongPPL and perplexity of ``[N]`` tokens, of which the first are not scored."""
    scored = torch.arange(len(key)) >= unscored
    longppl = long_perplexity(log_likelihood, key & scored)
    perplexity = long_perplexity(log_likelihood, scored)
    return float(longppl), float(perplexity)


def _format_perplexity(value: float) -> str:
    if math.isnan(value):
        return "—"
    if value >= 1e6:
        return f"{value:.2e}".replace("inf", "∞")
    if value >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}"
