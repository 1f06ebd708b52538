"""LongPPL as a task of lm-evaluation-harness, whose YAML file is `docs/recipes/lm_eval/longppl.yaml`."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import resolve_max_length
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.key_tokens import find_key_tokens
from lightning_modules.scoring.measure import Document
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from longce.cli.measuring import read_texts

SERVER_MAX_LENGTH = 2048
"""Tokens that the harness sends to a server by default."""

_METHOD = "_loglikelihood_tokens"
"""Method of a model of the harness that scores token ids; the public ones would tokenize parts of the text again."""

_log = logging.getLogger("lm_eval.longppl")  # which the harness shows


class TokenRequest(Instance):
    """A request that is also what `_loglikelihood_tokens` reads: a name, and the ids of context and continuation."""

    def __iter__(self) -> Any:
        return iter(self.arguments)

    def __getitem__(self, index: int) -> Any:
        return self.arguments[index]


class LongPPLTask(ConfigurableTask):
    """Task of the harness with a request for each run of consecutive key tokens.

    The context of a run is all tokens before it. The harness returns one log-likelihood for each request, so each run
    takes a forward pass.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})
        self.OUTPUT_TYPE = _METHOD  # by which the harness gives all processes the same number of requests

    @override
    def build_all_requests(self, *args: Any, cache_requests: bool = False, **kwargs: Any) -> None:
        if cache_requests:
            raise ValueError(
                "`--cache_requests` would reuse requests for earlier texts or key tokens, because the harness stores"
                " requests by the name of the task: remove it."
            )
        super().build_all_requests(*args, cache_requests=False, **kwargs)

    @override
    def fewshot_context(self, *_: Any, **__: Any) -> str:
        return ""  # a document has neither examples nor a chat template before it

    @override
    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        ids = doc["token_ids"]
        requests: list[Instance] = []
        for start, stop in doc["runs"]:
            arguments = (f"{doc['name']}, tokens {start} to {stop}", ids[:start], ids[start:stop])
            requests.append(TokenRequest(_METHOD, doc, arguments, len(requests), kwargs["metadata"]))
        return requests


def sum_log_likelihoods(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Return the sum of the log-likelihoods of a document's key tokens in nats, and their number."""
    return {"longppl": (sum(log_likelihood for log_likelihood, _ in results), doc["key_tokens"])}


def read_documents(
    texts: str | Sequence[str] = "",
    key_tokens: str = "",
    *,
    text_column: str = "text",
    alpha: float = 2.0,
    beta: float = -2.0,
    cut_texts: bool = False,
    add_special_tokens: bool = False,
    **model_args: Any,
) -> dict[str, Dataset]:
    """Return the documents with key tokens, in the tokens of the evaluated model, as the split ``test``.

    The arguments are the task's metadata, to which the harness adds those of ``--model_args``.

    Args:
        texts: Text, JSON-lines and parquet files or patterns, as for `longce score`.
        key_tokens: Folder with the token scores of these texts by one evaluator: `cache_dir` of `longce score`.
        text_column: Column or field of the text in parquet and JSON-lines files.
        alpha: Key tokens have a long-short difference (LSD) above alpha, in nats.
        beta: Key tokens have a long-context log-likelihood (LCL) above beta, in nats.
        cut_texts: Whether `longce score` has cut texts (`max_tokens`): their beginnings with scores are used.
        add_special_tokens: Whether the model's tokenizer adds special tokens before a text.
        model_args: Arguments of the model: the name of its tokenizer, and its maximum length.

    Raises:
        ValueError: If texts, key tokens or the tokenizer are missing, no text has key tokens, or the model would not
            see all tokens before one.
    """
    # 1. Find the texts and the evaluator's scores of them.
    if not texts or not key_tokens:
        raise ValueError('Name texts and key tokens: --metadata \'{"texts": "books/*.txt", "key_tokens": "FOLDER"}\'.')
    patterns = [texts] if isinstance(texts, str) else texts
    files = [file for pattern in patterns for file in sorted(glob(pattern)) or [pattern]]
    scores_by_hash = _load_scores(key_tokens)
    evaluated = _find_scores(read_texts(files, None, text_column), scores_by_hash, key_tokens, cut_texts=cut_texts)
    # 2. Find the key tokens among those of the model.
    tokenizer = _load_tokenizer(model_args)
    max_length = _find_max_length(model_args, tokenizer)
    rows: list[dict[str, Any]] = []
    requests = 0
    for name, (text, scores) in evaluated.items():
        document = Document.of_row(encode_document(text, tokenizer, name=name, add_special_tokens=add_special_tokens))
        key = find_key_tokens(scores, document.tokens, alpha=alpha, beta=beta).mask & document.scored
        runs = _find_runs(key)
        if not runs:
            continue  # the harness cannot have a document without requests
        _check_length(name, runs[-1][1], len(key), max_length)
        ids = document.tokens.ids.tolist()
        rows.append({"name": name, "token_ids": ids, "runs": runs, "key_tokens": int(key.sum())})
        requests += len(runs)
    if not rows:
        raise ValueError(f"None of the {len(evaluated)} texts has a key token at alpha = {alpha} and beta = {beta}.")
    # 3. Report the contents of the task.
    key_count = sum(row["key_tokens"] for row in rows)
    left_out = len(evaluated) - len(rows)
    _log.info("%d key tokens of %d texts in %d requests; %d without any.", key_count, len(rows), requests, left_out)
    return {"test": Dataset.from_list(rows)}


def _check_length(name: str, last: int, tokens: int, max_length: int) -> None:
    """Refuse a text with ``last`` tokens up to the last key token, of which the harness would cut off some."""
    if last >= max_length:
        raise ValueError(
            f"'{name}' has key tokens up to token {last:,} of {tokens:,}, and the maximum length of the model is"
            f" {max_length:,}: the harness would cut off the beginning of their context. Set max_length in"
            " --model_args, or cut the texts (`longce score --max_tokens`, with another --cache_dir)."
        )


def _load_scores(folder: str) -> dict[str, list[TokenScores]]:
    """Return all token scores in a folder by the hash of their text."""
    paths = sorted(Path(folder).expanduser().rglob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"`key_tokens` = '{folder}' has no token scores: run `longce score FILES --evaluator EVALUATOR --model"
            f" EVALUATOR --cache_dir {folder}`."
        )
    scores = defaultdict(list)
    for path in paths:
        found = TokenScores.load(path)
        scores[found.text_sha256].append(found)
    return scores


def _find_scores(
    texts: Mapping[str, str], scores: Mapping[str, Sequence[TokenScores]], folder: str, *, cut_texts: bool
) -> dict[str, tuple[str, TokenScores]]:
    """Return the part of each text that the evaluator has read, the whole or its beginning, with its scores."""
    ends = set[int]()
    if cut_texts:
        ends = {int(each.offsets.max()) for same_text in scores.values() for each in same_text}
    evaluated: dict[str, tuple[str, TokenScores]] = {}
    evaluators = set()
    for name, text in texts.items():
        beginnings = [text[:end] for end in sorted(ends, reverse=True) if end < len(text)]
        read = next((each for each in (text, *beginnings) if text_sha256(each) in scores), None)
        if read is None:
            raise ValueError(
                f"'{folder}' has key tokens of other texts, but not of '{name}': score the same files with `longce"
                " score`. If its `--max_tokens` has cut them, set cut_texts to true in --metadata."
            )
        found = scores[text_sha256(read)]
        evaluators |= {(each.evaluator, each.context_length, each.stride, each.settings) for each in found}
        evaluated[name] = read, min(found, key=lambda each: each.floor)  # of all tokens, if they are there
    if len(evaluators) > 1:
        raise ValueError(
            f"'{folder}' has key tokens of these texts by {len(evaluators)} evaluators or settings:"
            f" {sorted(evaluators)}. Use another --cache_dir of `longce score` for each."
        )
    return evaluated


def _load_tokenizer(model_args: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    # Servers are given a `tokenizer`, or the hub id as `model`.
    names = [model_args.get(option) for option in ("tokenizer", "pretrained", "model")]
    name = next((name for name in names if isinstance(name, str) and name), None)
    if name is None:
        raise ValueError("The tokenizer of the model is unknown: set pretrained or tokenizer in --model_args.")
    revision = None if model_args.get("tokenizer") else model_args.get("revision")
    return load_tokenizer(name, revision=revision, trust_remote_code=bool(model_args.get("trust_remote_code")))


def _find_max_length(model_args: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of tokens above which the harness cuts a request, or one more."""
    for option in ("max_length", "max_model_len"):
        if model_args.get(option):
            return int(model_args[option])
    if model_args.get("base_url") or not model_args.get("pretrained"):
        return SERVER_MAX_LENGTH
    config = AutoConfig.from_pretrained(
        model_args["pretrained"],
        revision=model_args.get("revision"),
        trust_remote_code=bool(model_args.get("trust_remote_code")),
    )
    return resolve_max_length(config, tokenizer)


def _find_runs(mask: Tensor) -> list[list[int]]:
    """Return start and end of each run of true values.

    >>> _find_runs(torch.tensor([False, True, True, False, True]))
    [[1, 3], [4, 5]]
    """
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff()
    return torch.stack([(edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]], dim=1).tolist()
