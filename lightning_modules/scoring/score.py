"""LongPPL and perplexity of text files in one call."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.functional.long_perplexity import _long_perplexity_compute, _long_perplexity_update
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import load_config, load_frozen
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import ScoreConfig
from lightning_modules.scoring.evaluator import EvaluatedDocument, Evaluator
from lightning_modules.scoring.key_tokens import add_coverage, document_tokens
from lightning_modules.scoring.token_scores import TokenScores, text_sha256
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import plain
from lightning_modules.utilities.text_files import check_output, read_text

log = logging.getLogger(__name__)


def score(files: str | Sequence[str], model: str, evaluator: str, **options: Any) -> dict[str, Any]:
    """Compute LongPPL and perplexity of a model on text files, with the key tokens of an evaluator.

    The evaluator goes first and is freed before the model is loaded: both never share the accelerator. If both are the
    same and read the same tokens, one long pass serves both.

    Args:
        files: UTF-8 text files, one document each.
        model: Hub id or local folder of the model to evaluate.
        evaluator: Hub id or local folder of the model that picks the key tokens; any tokenizer.
        options: The other fields of `lightning_modules.scoring.config.ScoreConfig`.

    Returns:
        ``longppl``, ``perplexity``, ``key_tokens`` and ``tokens`` of the corpus (averages over tokens, not documents)
        and under ``documents`` the same for each file, in order, with its name under ``file``. ``longppl`` is NaN
        without key tokens, ``perplexity`` for a document of a single token. ``alignment`` is how key
        tokens came from the evaluator's tokens: ``tokens`` (both read the same tokens), ``characters`` (Equation 9) or
        ``authors``. ``tokens_sharing_characters`` and ``tokens_without_characters`` are shares of the model's tokens,
        the same names after ``evaluator_`` of the evaluator's. ``model`` is its name, and ``settings`` what the numbers
        also depend on: the texts by their hash, the evaluator, lengths, thresholds.

    Raises:
        ValueError: If a file, a model or a number cannot be used; before any model is loaded, where that can be known.
    """
    config = ScoreConfig(model=model, evaluator=evaluator, **options)
    files = [files] if isinstance(files, str) else files
    texts = {file: read_text(file) for file in files}
    _check_repeated(files, texts)
    if config.output is not None:
        check_output(config.output)
    evaluated_model = EvaluatedModel(config.loading(model), find_device(config.device))
    scorer = Evaluator(config.evaluator_config(config.key_tokens))
    documents = evaluated_model.read(
        texts,
        add_special_tokens=config.add_special_tokens,
        max_tokens=config.max_tokens,
        trimmed_offsets=config.key_tokens == "authors",
    )
    same = model_identity(evaluated_model.config) == scorer.identity
    found = []
    for document in tqdm(documents, desc="evaluator", unit="document", disable=None):
        name, tokens = document["names"][0], document_tokens(document)
        settings: dict[str, Any] = {"device": evaluated_model.device, "key_tokens_only": config.key_tokens_only}
        evaluated = scorer.evaluate(document["text"][0], tokens, name=name, **settings)
        found.append((document, evaluated, _shared_pass(document, evaluated.scores) if same else None))
    scorer.release()
    result = {**_evaluate(found, evaluated_model), "model": model, "settings": _settings(config, texts.values())}
    if config.output is not None:
        write_atomically(Path(config.output), (json.dumps(plain(result), indent=2) + "\n").encode())
    return result


def _settings(config: ScoreConfig, texts: Iterable[str]) -> dict[str, Any]:
    """Return everything except the model that the numbers depend on, to compare results."""
    names = ("max_tokens", "add_special_tokens", "evaluator", "evaluator_add_special_tokens")
    numbers = ("context_length", "stride", "alpha", "beta")
    return {
        "texts": hashlib.sha256("".join(map(text_sha256, texts)).encode()).hexdigest()[:16],
        **{name: getattr(config, name) for name in (*names, *numbers)},
        "key_token_rule": config.key_tokens,
    }


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


def _shared_pass(document: PackedBatch, scores: TokenScores) -> torch.Tensor | None:
    """Return the long log-likelihoods of an evaluator that is the model itself, if both have the same tokens."""
    return scores.long.unsqueeze(0) if torch.equal(scores.token_ids, document["input_ids"][0]) else None


class EvaluatedModel:
    """The evaluated model, loaded for the first document that it has not scored as the evaluator."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.name = str(config.pretrained_model_name_or_path)
        self._backbone: Backbone | None = None

    def read(self, texts: Mapping[str, str], *, trimmed_offsets: bool = False, **options: Any) -> list[PackedBatch]:
        """Return documents by their names in the model's tokens, without loading its weights.

        Options are those of `encode_document`.

        Raises:
            ValueError: If the model is not there, or its files are damaged, or its tokenizer is another model's.
        """
        config = load_config(self.config)
        check_weight_files(self.name)
        trusted = self.config.trust_remote_code
        tokenizer = load_tokenizer(self.name, trust_remote_code=trusted, trimmed_offsets=trimmed_offsets)
        documents = [encode_document(text, tokenizer, name=name, **options) for name, text in texts.items()]
        _check_vocabulary(documents, config, self.name)
        return documents

    def log_likelihood(self, document: PackedBatch) -> torch.Tensor:
        """Return ``[1, T]`` log-likelihoods of one document in nats, in main memory."""
        if self._backbone is None:
            self._backbone = load_frozen(self.config, self.device)
        self._backbone.check_token_ids(document)
        with torch.no_grad():
            return self._backbone(batch_to(document, self.device)).cpu()


def _evaluate(
    found: list[tuple[PackedBatch, EvaluatedDocument, torch.Tensor | None]], model: EvaluatedModel
) -> dict[str, Any]:
    # The metric's own sums: importing torchmetrics would take longer than scoring a short text.
    sums: dict[str, list[tuple[torch.Tensor, ...]]] = {"longppl": [], "perplexity": []}
    rows: list[dict[str, Any]] = []
    for document, evaluated, known in tqdm(found, desc="model", unit="document", disable=None):
        log_likelihood = model.log_likelihood(document) if known is None else known
        scored = document["labels"].ne(IGNORE_INDEX)
        key = evaluated.key & scored
        row: dict[str, Any] = {"file": document["names"][0]}
        for name, influence in (("longppl", key), ("perplexity", scored)):
            sums[name].append(_long_perplexity_update(log_likelihood, influence))
            row[name] = float(_long_perplexity_compute(*sums[name][-1]))
        row |= {"key_tokens": int(key.sum()), "tokens": scored.numel(), "alignment": evaluated.alignment}
        row |= evaluated.coverage.shares()
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
    coverage = add_coverage(evaluated.coverage for _, evaluated, _ in found)
    if (warning := coverage.warning()) is not None:
        log.warning(warning)
    alignments = sorted({row["alignment"] for row in rows})
    return {**totals, "alignment": ", ".join(alignments), **coverage.shares(), "documents": rows}


def find_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is the first GPU, or else the CPU.

    Raises:
        ValueError: If it is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` '{name}' is not available: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ValueError("`device` 'meta' computes nothing. Name one such as 'cpu' or 'cuda:0'.")
    return device


def _check_vocabulary(documents: list[PackedBatch], config: PreTrainedConfig, model: str) -> None:
    """Raise a ``ValueError`` for tokens beyond the model's embedding, before the evaluator's pass over the text."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(document["input_ids"].max()) for document in documents)
    if size is not None and largest >= size:
        raise ValueError(
            f"The tokenizer of '{model}' gives token {largest}, beyond the model's embedding of {size} tokens: it is"
            " not the one of this model. Fetch the folder again."
        )


def _check_repeated(files: Sequence[str], texts: Mapping[str, str]) -> None:
    """Raise a ``ValueError`` for a file given twice, which would count twice; warn of equal texts in two files."""
    places, first = set[Path](), dict[str, str]()
    for file in files:
        if (place := Path(file).resolve()) in places:
            raise ValueError(f"'{file}' is given twice, and would count twice: leave it out once.")
        places.add(place)
        if (same := first.setdefault(texts[file], file)) != file:
            log.warning("'%s' holds the same text as '%s': the corpus counts it twice.", file, same)
