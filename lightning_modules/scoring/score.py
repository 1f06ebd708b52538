"""LongPPL and perplexity of text files: the one-line use for people who do not train."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.functional.influence import check_thresholds
from lightning_modules.functional.long_perplexity import _long_perplexity_compute, _long_perplexity_update
from lightning_modules.functional.windows import check_context
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import DType, load_backbone, load_config
from lightning_modules.models.probe import check_scoring
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.evaluator import Evaluator
from lightning_modules.scoring.key_tokens import (
    Alignment,
    Coverage,
    Rule,
    add_coverage,
    check_rule,
    document_tokens,
    find_key_tokens,
    measure_coverage,
)
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import plain
from lightning_modules.utilities.text_files import check_output, read_text

log = logging.getLogger(__name__)


def score(
    files: str | Sequence[str],
    model: str,
    evaluator: str,
    *,
    context_length: int = 4096,
    stride: int = 1024,
    alpha: float = 2.0,
    beta: float = -2.0,
    key_tokens: Rule = "paper",
    key_tokens_only: bool = False,
    output: str | None = None,
    max_tokens: int | None = None,
    add_special_tokens: bool = False,
    evaluator_add_special_tokens: bool = True,
    dtype: DType = "auto",
    attn_implementation: str = "auto",
    device: str = "auto",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """LongPPL and perplexity of a model on text files, with the key tokens of an evaluator.

    The evaluator goes first and is freed before the model is loaded: both never share the accelerator. If both are the
    same and read the same tokens, one long pass serves both.

    Args:
        files: UTF-8 text files, one document each.
        model: Hub id or local folder of the model to be judged.
        evaluator: Hub id or local folder of the model that picks the key tokens; any tokenizer.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        key_tokens: How key tokens come from the evaluator's tokens to the model's: ``paper`` (the same tokens as they
            are, others by Equation 9), or ``authors``, exactly as their package does, for published numbers.
        key_tokens_only: Spare the evaluator's short pass tokens that cannot be key because their long log-likelihood is
            at most ``beta``. Its stored scores then serve no lower ``beta``, and no soft influence, later.
        output: JSON file to write the result to.
        max_tokens: Tokens of each document to keep, as the model counts them; all by default.
        add_special_tokens: Whether the model's tokenizer adds its own; off, as in the code of the paper's authors.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds its own; on, as in their code.
        dtype: Of the weights of both; ``auto`` keeps the stored one.
        attn_implementation: Of both, as in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
        cache_dir: Folder of the evaluator's stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the models' repositories; off unless you trust it.

    Returns:
        ``longppl``, ``perplexity``, ``key_tokens`` and ``tokens`` of the corpus (averages over tokens, not documents)
        and under ``documents`` the same for each file, in order, with its name under ``file``. ``longppl`` is NaN
        where there is no key token, ``perplexity`` where a document has a single token. ``alignment`` tells how key
        tokens came from the evaluator's tokens: ``tokens`` (both read the same tokens), ``characters`` (Equation 9) or
        ``authors``. ``tokens_sharing_characters`` and ``tokens_without_characters`` are shares of the model's tokens,
        the same names after ``evaluator_`` of the evaluator's. ``model`` is its name, and ``settings`` what the numbers
        also depend on: the texts by their hash, the evaluator, lengths, thresholds.

    Raises:
        ValueError: If a file, a model or a number cannot be used; before any model is loaded, where that can be known.
    """
    check_thresholds(alpha, beta)
    check_rule(key_tokens)
    check_context(context_length, stride)
    files = [files] if isinstance(files, str) else files
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` must be 1 or more, got {max_tokens}.")
    texts = [read_text(file) for file in files]
    _check_repeated(files, texts)
    if output is not None:
        check_output(output)
    place = find_device(device)
    config = load_config(model, trust_remote_code=trust_remote_code)
    for name in {model, evaluator}:
        check_weight_files(name)
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    settings["trust_remote_code"] = trust_remote_code
    judge = Evaluator(
        evaluator,
        context_length=context_length,
        stride=stride,
        add_special_tokens=evaluator_add_special_tokens,
        cache_dir=cache_dir,
        trimmed_offsets=key_tokens == "authors",
        **settings,
    )
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, trimmed_offsets=key_tokens == "authors")
    documents = [
        encode_document(text, tokenizer, name=file, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        for file, text in zip(files, texts, strict=True)
    ]
    check_vocabulary(documents, config, model)
    same = model_identity(model, trust_remote_code=trust_remote_code) == judge.identity
    judged = []
    floor = beta if key_tokens_only else None
    for document in tqdm(documents, desc="evaluator", unit="document", disable=None):
        scores = judge.scores(document["text"][0], device=place, name=document["names"][0], beta=floor)
        tokens = document_tokens(document)
        key = find_key_tokens(scores, tokens, alpha=alpha, beta=beta, rule=key_tokens)
        coverage = measure_coverage(tokens, scores, key.alignment)
        judged.append(_Judged(document, *key, coverage, _shared_pass(document, scores) if same else None))
    judge.release()
    result = _evaluate(judged, ScoredModel(model, place, settings))
    result |= {
        "model": model,
        "settings": {
            "texts": hashlib.sha256("".join(map(text_sha256, texts)).encode()).hexdigest()[:16],
            "max_tokens": max_tokens,
            "add_special_tokens": add_special_tokens,
            "evaluator": evaluator,
            "evaluator_add_special_tokens": evaluator_add_special_tokens,
            "context_length": context_length,
            "stride": stride,
            "alpha": alpha,
            "beta": beta,
            "key_token_rule": key_tokens,
        },
    }
    if output is not None:
        write_atomically(Path(output), (json.dumps(plain(result), indent=2) + "\n").encode())
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result of `score` as text: a row per document, one for the corpus, and how key tokens were found."""
    rows = [*result["documents"], {**result, "file": f"corpus of {len(result['documents'])}"}]
    width = max(len("document"), *(len(row["file"]) for row in rows))
    lines = [f"{'document':<{width}} {'tokens':>10} {'key tokens':>10} {'LongPPL':>12} {'perplexity':>12}"]
    lines += [
        f"{row['file']:<{width}} {row['tokens']:>10,} {row['key_tokens']:>10,}"
        f" {row['longppl']:>12.4f} {row['perplexity']:>12.4f}"
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.insert(-1, "-" * len(lines[0]))
    lines.append(
        f"Key tokens aligned by {result['alignment']}; {result['tokens_sharing_characters']:.1%} of the tokens share a"
        f" character, {result['tokens_without_characters']:.1%} cover none; of the evaluator's"
        f" {result.get('evaluator_tokens_sharing_characters', 0):.1%} and"
        f" {result.get('evaluator_tokens_without_characters', 0):.1%}."
    )
    return "\n".join(lines)


class _Judged(NamedTuple):
    """A document, its key tokens ``[T]``, and the model's log-likelihoods ``[1, T]`` if the evaluator's serve."""

    document: PackedBatch
    key: torch.Tensor
    alignment: Alignment
    coverage: Coverage
    log_likelihood: torch.Tensor | None


def _shared_pass(document: PackedBatch, scores: TokenScores) -> torch.Tensor | None:
    """The long log-likelihoods of an evaluator that is the model itself, if both read the same tokens."""
    if torch.equal(scores.token_ids, document["input_ids"][0]):
        return scores.long.unsqueeze(0)
    log.info(
        "%s: evaluator and model are the same, but not their special tokens. Make `add_special_tokens` and"
        " `evaluator_add_special_tokens` equal to save a pass over the text.",
        document["names"][0],
    )
    return None


class ScoredModel:
    """The model to be judged, loaded when a document appears that it has not scored as the evaluator."""

    def __init__(self, name: str, device: torch.device, settings: dict[str, Any]) -> None:
        self.name, self.device, self.settings = name, device, settings
        self.backbone: Backbone | None = None

    def log_likelihood(self, document: PackedBatch) -> torch.Tensor:
        """Of a document of one row: ``[1, T]`` in nats, in main memory."""
        if self.backbone is None:
            backbone = load_backbone(self.name, device=self.device, **self.settings).eval().requires_grad_(False)
            self.backbone = backbone.to(self.device)
            check_scoring(self.backbone)
        self.backbone.check_token_ids(document)
        with torch.no_grad():
            return self.backbone(batch_to(document, self.device)).cpu()


def _evaluate(judged: list[_Judged], model: ScoredModel) -> dict[str, Any]:
    # The metric's own sums: importing torchmetrics would take longer than scoring a short text.
    sums: dict[str, list[tuple[torch.Tensor, ...]]] = {"longppl": [], "perplexity": []}
    rows: list[dict[str, Any]] = []
    for document, mask, alignment, coverage, known in tqdm(judged, desc="model", unit="document", disable=None):
        log_likelihood = model.log_likelihood(document) if known is None else known
        scored = document["labels"].ne(IGNORE_INDEX)
        key = mask & scored
        row: dict[str, Any] = {"file": document["names"][0]}
        for name, influence in (("longppl", key), ("perplexity", scored)):
            sums[name].append(_long_perplexity_update(log_likelihood, influence))
            row[name] = float(_long_perplexity_compute(*sums[name][-1]))
        row |= {"key_tokens": int(key.sum()), "tokens": scored.numel(), "alignment": alignment, **coverage.shares()}
        rows.append(row)
    without = sum(row["key_tokens"] == 0 for row in rows)
    if without:
        log.warning(
            "%d of %d documents have no key token: they may be too short for `context_length`, or the evaluator may"
            " not use the long context.",
            without,
            len(rows),
        )
    totals: dict[str, Any] = {}
    for name, parts in sums.items():
        total, weight, largest = (torch.stack(values) for values in zip(*parts, strict=True))
        totals[name] = float(_long_perplexity_compute(total.sum(), weight.sum(), largest.amax()))
    totals |= {name: sum(row[name] for row in rows) for name in ("key_tokens", "tokens")}
    coverage = add_coverage(document.coverage for document in judged)
    if (warning := coverage.warning()) is not None:
        log.warning(warning)
    alignments = sorted({row["alignment"] for row in rows})
    return {**totals, "alignment": ", ".join(alignments), **coverage.shares(), "documents": rows}


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the first GPU, if there is one.

    Raises:
        ValueError: If it is not to be had here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` '{name}' is not to be had here: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ValueError("`device` 'meta' computes nothing. Name one such as 'cpu' or 'cuda:0'.")
    return device


def check_vocabulary(documents: list[PackedBatch], config: PreTrainedConfig, model: str) -> None:
    """Raise a ``ValueError`` for tokens beyond the model's embedding, before the evaluator's pass over the text."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(document["input_ids"].max()) for document in documents)
    if size is not None and largest >= size:
        raise ValueError(
            f"The tokenizer of '{model}' gives token {largest}, beyond the model's embedding of {size} tokens: it is"
            " not the one of this model. Fetch the folder again."
        )


def _check_repeated(files: Sequence[str], texts: Sequence[str]) -> None:
    """Raise a ``ValueError`` for a file given twice, which would count twice; warn of equal texts in two files."""
    places, first = set[Path](), dict[str, str]()
    for file, text in zip(files, texts, strict=True):
        if (place := Path(file).resolve()) in places:
            raise ValueError(f"'{file}' is given twice, and would count twice: leave it out once.")
        places.add(place)
        if (same := first.setdefault(text, file)) != file:
            log.warning("'%s' holds the same text as '%s': the corpus counts it twice.", file, same)
