"""LongPPL and perplexity of text files (``longce score``)."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.functional.long_perplexity import _long_perplexity_compute, _long_perplexity_update
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.identity import check_same_model, describe_model
from lightning_modules.models.loading import check_model, load_scorer
from lightning_modules.models.lockstep import Scorer
from lightning_modules.models.provenance import Provenance, describe_key_tokens
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.checks import check_log_likelihood, warn_of_chance
from lightning_modules.scoring.config import ScoreConfig, tokenizer_name
from lightning_modules.scoring.evaluator import EvaluatedDocument, Evaluator
from lightning_modules.scoring.key_tokens import add_coverage, document_tokens
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities.plain_json import write_json
from lightning_modules.utilities.text_files import check_output, read_text

log = logging.getLogger(__name__)


def score(files: str | Sequence[str], model: str, evaluator: str, **options: Any) -> dict[str, Any]:
    """Compute LongPPL and perplexity of a model on text files, with the key tokens of an evaluator.

    The evaluator is freed before the model is loaded, so they never share the accelerator. If they are the same model
    with the same tokens, the evaluator's long pass is used for both.

    Args:
        files: UTF-8 text files, one document each.
        model: Hub id or local folder of the model to evaluate.
        evaluator: Hub id or local folder of the model that finds the key tokens, with any tokenizer.
        options: The other fields of `lightning_modules.scoring.config.ScoreConfig`.

    Returns:
        ``longppl``, ``perplexity``, ``key_tokens`` and ``tokens`` of the corpus (means over tokens, not documents), and
        under ``documents`` the same for each file, in order, with its name under ``file``. ``longppl`` is NaN without
        key tokens, ``perplexity`` for a document of a single token. ``alignment`` is how key tokens were transferred
        from the evaluator's tokens: ``tokens`` (both have the same tokens), ``characters`` (Equation 9) or ``authors``.
        ``tokens_sharing_characters`` and ``tokens_without_characters`` are fractions of the model's tokens; with the
        prefix ``evaluator_``, of the evaluator's. ``skipped`` are files without text, if there are others. ``model`` is
        its name, and ``provenance`` identifies weights, tokenizer, dtype and attention of model and evaluator, and
        ``settings`` contains everything else that the numbers depend on: a hash of the texts (each document has that
        of its own, as it was scored), lengths, thresholds.

    Raises:
        ValueError: If a file, a model or a number cannot be used; if possible before any model is loaded.
    """
    config = ScoreConfig(model=model, evaluator=evaluator, **options)
    files = [files] if isinstance(files, str) else files
    texts, skipped = _read_texts(files)
    if config.output is not None:
        check_output(config.output)
    evaluated_model = EvaluatedModel(config.loading(model), find_device(config.device), config.model_tokenizer)
    evaluator_model = Evaluator(config.evaluator_config(config.key_tokens))
    documents = evaluated_model.read(
        texts,
        add_special_tokens=config.add_special_tokens,
        max_tokens=config.max_tokens,
        trimmed_offsets=config.key_tokens == "authors",
    )
    device = evaluated_model.device
    provenance = {"model": evaluated_model.provenance, "evaluator": evaluator_model.provenance(device)}
    same = provenance["model"].identity == provenance["evaluator"].identity
    scored = []
    for document in tqdm(documents, desc="evaluator", unit="document", disable=None):
        name, tokens = document["names"][0], document_tokens(document)
        settings: dict[str, Any] = {"device": device, "key_tokens_only": config.key_tokens_only}
        evaluated = evaluator_model.evaluate(document["text"][0], tokens, name=name, **settings)
        reusable = same and torch.equal(evaluated.scores.token_ids, document["input_ids"][0])
        scored.append((document, evaluated, evaluated.scores.long.unsqueeze(0) if reusable else None))
    evaluator_model.release()
    result = {
        **_evaluate(scored, evaluated_model),
        "skipped": skipped,
        "model": model,
        "provenance": {kind: found._asdict() for kind, found in provenance.items()},
        "settings": _describe_settings(config, texts.values()),
    }
    if config.output is not None:
        write_json(Path(config.output), result)
    return result


def _describe_settings(config: ScoreConfig, texts: Iterable[str]) -> dict[str, Any]:
    """Return all settings that the numbers depend on, except the model."""
    names = ("max_tokens", "add_special_tokens", "evaluator", "evaluator_add_special_tokens")
    numbers = ("context_length", "stride", "alpha", "beta")
    return {
        "texts": hashlib.sha256("".join(map(text_sha256, texts)).encode()).hexdigest()[:16],
        **{name: getattr(config, name) for name in (*names, *numbers)},
        "key_token_rule": config.key_tokens,
    }


def table(result: dict[str, Any]) -> str:
    """Format the result of `score`: its heading, and a table with a row per document and one for the corpus."""
    rows = [*result["documents"], {**result, "file": f"corpus of {len(result['documents'])}"}]
    width = max(len("document"), *(len(row["file"]) for row in rows))
    lines = [f"{'document':<{width}} {'tokens':>10} {'key tokens':>10} {'LongPPL':>12} {'perplexity':>12}"]
    lines += [
        f"{row['file']:<{width}} {row['tokens']:>10,} {row['key_tokens']:>10,}"
        f" {row['longppl']:>12.4f} {row['perplexity']:>12.4f}"
        for row in rows
    ]
    settings, models = result["settings"], result["provenance"]
    heading = [
        f"model {result['model']} ({Provenance(**models['model'])})",
        describe_key_tokens(settings, Provenance(**models["evaluator"])),
        "",
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.insert(-1, "-" * len(lines[0]))
    lines.append(
        f"Key tokens aligned by {result['alignment']}. Tokens that share a character:"
        f" {result['tokens_sharing_characters']:.1%} (evaluator:"
        f" {result.get('evaluator_tokens_sharing_characters', 0):.1%}); that cover none:"
        f" {result['tokens_without_characters']:.1%} (evaluator:"
        f" {result.get('evaluator_tokens_without_characters', 0):.1%})."
    )
    return "\n".join([*heading, *lines])


class EvaluatedModel:
    """The evaluated model, which is loaded when it has to score a document; ``tokenizer`` is by default its own."""

    def __init__(self, config: ModelConfig, device: torch.device, tokenizer: str | None = None) -> None:
        self.config, self.device = config, device
        self.name = str(config.pretrained_model_name_or_path)
        self._tokenizer_name = tokenizer_name(self.name, tokenizer, "`model_tokenizer`")
        self._backbone: Scorer | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the documents."""
        return load_tokenizer(self._tokenizer_name, trust_remote_code=self.config.trust_remote_code)

    @cached_property
    def provenance(self) -> Provenance:
        """What identifies the model; its weights must be the same when they are loaded."""
        return describe_model(self.config, self.tokenizer, device=self.device)

    def read(self, texts: Mapping[str, str], *, trimmed_offsets: bool = False, **options: Any) -> list[PackedBatch]:
        """Tokenize documents, given by name, without loading the model's weights.

        Options are those of `encode_document`.
        """
        config, tokenizer = check_model(self.config), self.tokenizer
        if trimmed_offsets:  # which is a part of the key-token rule, not of the model
            trust = self.config.trust_remote_code
            tokenizer = load_tokenizer(self._tokenizer_name, trust_remote_code=trust, trimmed_offsets=True)
        documents = [encode_document(text, tokenizer, name=name, **options) for name, text in texts.items()]
        if config is not None:
            _check_vocabulary(documents, config, self.name)
        return documents

    def log_likelihood(self, document: PackedBatch) -> torch.Tensor:
        """Compute the ``[1, T]`` log-likelihoods of a document in nats, in main memory.

        Raises:
            ValueError: If the document has ids outside of the embedding, or a log-likelihood is impossible.
        """
        if self._backbone is None:
            identity = self.provenance.identity
            self._backbone = load_scorer(self.config, self.device)
            check_same_model(identity, self.config)
        self._backbone.check_batch(document)
        with torch.no_grad():
            log_likelihood = self._backbone(batch_to(document, self._backbone.device)).cpu()
        text, offsets, name = document["text"][0], document["offsets"][0], document["names"][0]
        about = {"model": self.name, "dtype": self.provenance.dtype, "document": name}
        check_log_likelihood(log_likelihood[0], **about, text=text, offsets=offsets)
        warn_of_chance(log_likelihood[0], document["labels"][0].ne(IGNORE_INDEX), self.name)
        return log_likelihood


def _evaluate(
    scored_documents: list[tuple[PackedBatch, EvaluatedDocument, torch.Tensor | None]], model: EvaluatedModel
) -> dict[str, Any]:
    """Compute LongPPL and perplexity of each document and of the corpus."""
    # Not `LongPerplexity`: importing torchmetrics takes longer than scoring a short text.
    sums: dict[str, list[tuple[torch.Tensor, ...]]] = {"longppl": [], "perplexity": []}
    rows: list[dict[str, Any]] = []
    for document, evaluated, reused in tqdm(scored_documents, desc="model", unit="document", disable=None):
        log_likelihood = model.log_likelihood(document) if reused is None else reused
        scored = document["labels"].ne(IGNORE_INDEX)
        key = evaluated.key & scored
        row: dict[str, Any] = {"file": document["names"][0], "text_sha256": evaluated.scores.text_sha256}
        for name, influence in (("longppl", key), ("perplexity", scored)):
            sums[name].append(_long_perplexity_update(log_likelihood, influence))
            row[name] = float(_long_perplexity_compute(*sums[name][-1]))
        row |= {"key_tokens": int(key.sum()), "tokens": scored.numel(), "alignment": evaluated.alignment}
        row |= evaluated.coverage.fractions()
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
    for name, of_documents in sums.items():
        total, weight, largest = (torch.stack(values) for values in zip(*of_documents, strict=True))
        totals[name] = float(_long_perplexity_compute(total.sum(), weight.sum(), largest.amax()))
    totals |= {name: sum(row[name] for row in rows) for name in ("key_tokens", "tokens")}
    coverage = add_coverage(evaluated.coverage for _, evaluated, _ in scored_documents)
    if (warning := coverage.warning()) is not None:
        log.warning(warning)
    alignments = sorted({row["alignment"] for row in rows})
    return {**totals, "alignment": ", ".join(alignments), **coverage.fractions(), "documents": rows}


def find_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` '{name}' is not available: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ValueError("`device` 'meta' does not compute anything: set one such as 'cpu' or 'cuda:0'.")
    return device


def _check_vocabulary(documents: list[PackedBatch], config: PreTrainedConfig, model: str) -> None:
    """Raise a ``ValueError`` for token ids outside of the model's embedding, before the evaluator scores the text."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(document["input_ids"].max()) for document in documents)
    if size is not None and largest >= size:
        raise ValueError(
            f"The tokenizer of '{model}' gives token id {largest}, but the model's embedding has {size} tokens: the"
            " tokenizer belongs to another model. Fetch the folder again."
        )


def _read_texts(files: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the files by name, and the files without text, which are skipped with a warning.

    Raises a ``ValueError`` for a file that is given twice, and warns about two files with the same text.
    """
    places, texts, first, skipped = set[Path](), dict[str, str](), dict[str, str](), list[str]()
    for file in files:
        if (place := Path(file).resolve()) in places:
            raise ValueError(f"'{file}' is given twice and would count twice: give it once.")
        places.add(place)
        text = read_text(file, may_be_blank=len(files) > 1)
        if not text.strip():
            skipped.append(file)
            continue
        if (same := first.setdefault(text, file)) != file:
            log.warning("'%s' has the same text as '%s', which counts twice in the corpus.", file, same)
        texts[file] = text
    if not texts:
        raise ValueError(f"All {len(files)} files are empty or only white space: pass files with text.")
    if skipped:
        log.warning("Skipped, because they are empty or only white space: %s", ", ".join(skipped))
    return texts, skipped
