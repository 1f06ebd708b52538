"""LongPPL and perplexity of text files (``longce score``)."""

import hashlib
import logging
import math
import shutil
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.long_perplexity import _long_perplexity_compute, _long_perplexity_update
from lightning_modules.functional.text_bits import TextBits, add_bits, text_bits
from lightning_modules.models.loading.provenance import Provenance, describe_key_tokens
from lightning_modules.models.progress import SECONDS, count_tokens, show_progress
from lightning_modules.scoring.config import ScoreConfig
from lightning_modules.scoring.evaluated_model import EvaluatedModel
from lightning_modules.scoring.evaluator import EvaluatedDocument, Evaluator
from lightning_modules.scoring.key_tokens import add_coverage, document_tokens
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.utilities.files import write_json
from lightning_modules.utilities.text_files import check_output, read_text

_COLUMNS = {
    ("", "tokens"): ("tokens", ","),
    ("key", "tokens"): ("key_tokens", ","),
    ("", "LongPPL"): ("longppl", ".4f"),
    ("per eval.", "token"): ("longppl_per_evaluator_token", ".4f"),
    ("", "perplexity"): ("perplexity", ".4f"),
    ("key bits", "/byte"): ("key_bits_per_byte", ".4f"),
    ("bits", "/byte"): ("bits_per_byte", ".4f"),
}
"""Columns of the table: the two lines of the head, the key in a result, and the format."""

_MIN_NAME = 12  # characters of a document's name in the table, also in a narrow terminal

log = logging.getLogger(__name__)


def score(files: str | Sequence[str] | Mapping[str, str], model: str, evaluator: str, **options: Any) -> dict[str, Any]:
    """Compute LongPPL and perplexity of a model on text files, with the key tokens of an evaluator.

    The evaluator is freed before the model is loaded, so they never share the accelerator. If they are the same model
    with the same tokens, the evaluator's long pass is used for both.

    Args:
        files: UTF-8 text files, one document each; or texts by their names.
        model: Hub id or local folder of the model to evaluate.
        evaluator: Hub id or local folder of the model that finds the key tokens, with any tokenizer.
        options: The other fields of `lightning_modules.scoring.config.ScoreConfig`.

    Returns:
        ``longppl``, ``perplexity``, ``key_tokens`` and ``tokens`` of the corpus (means over tokens, not documents), and
        under ``documents`` the same for each ``file``. ``longppl`` is NaN without key tokens. ``alignment`` is that of
        `find_key_tokens`, and ``tokens_..`` and ``evaluator_tokens_..`` the fractions of `Coverage`.
        ``bits_per_byte``, ``key_bits_per_byte`` (with its largest ``.._error``) and ``longppl_per_evaluator_token`` are
        those of `TextBits`. ``skipped`` are files without text. ``provenance`` identifies model and evaluator, and
        ``settings`` has everything else that the numbers depend on, with a hash of the texts.

    Raises:
        ValueError: If a file, a model or a number cannot be used; if possible before any model is loaded.
    """
    # 1. Read the texts and check everything that needs no weights.
    config = ScoreConfig(model=model, evaluator=evaluator, **options)
    if isinstance(files, Mapping):
        texts = dict(files)
        skipped = list[str]()
    else:
        texts, skipped = _read_texts([files] if isinstance(files, str) else files)
    if config.output is not None:
        check_output(config.output)
    evaluated_model = EvaluatedModel(config.model_loading(model), find_device(config.device), config.model_tokenizer)
    evaluator_model = Evaluator(config.evaluator_config(config.key_token_rule))
    # 2. Cut the texts by the evaluator's tokens, so that all models get the same ones, and tokenize them.
    if config.max_tokens is not None:
        texts = {name: evaluator_model.cut(text, config.max_tokens, name=name) for name, text in texts.items()}
    trimmed = config.key_token_rule == "authors"
    documents = evaluated_model.read(texts, add_special_tokens=config.add_special_tokens, trimmed_offsets=trimmed)
    # Before the weights are loaded: their files may change while the evaluator scores.
    provenance = {
        "model": evaluated_model.provenance,
        "evaluator": evaluator_model.provenance(evaluated_model.device),
    }
    # 3. Find the key tokens of all documents, then free the evaluator.
    scored = _find_key_tokens(documents, evaluator_model, evaluated_model, config)
    evaluator_model.release()
    # 4. Score the documents with the model, and average over their key tokens.
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


_Scored = tuple[PackedBatch, EvaluatedDocument, torch.Tensor | None]
"""A document, its key tokens, and the model's ``[1, T]`` log-likelihoods in nats if the evaluator's are the same."""


def _find_key_tokens(
    documents: Sequence[PackedBatch], evaluator: Evaluator, model: EvaluatedModel, config: ScoreConfig
) -> list[_Scored]:
    # If the evaluator is the model and has read the same tokens, its long pass is also that of the model.
    same = model.provenance.identity == evaluator.provenance(model.device).identity
    scored: list[_Scored] = []
    sizes = {"context_length": config.context_length, "stride": config.stride}
    tokens = [count_tokens(document["labels"].numel(), **sizes) for document in documents]
    with show_progress(documents, "evaluator", tokens) as shown:
        for document in shown:
            evaluated = evaluator.evaluate(
                document["text"][0],
                document_tokens(document),
                device=model.device,
                name=document["names"][0],
                key_tokens_only=config.key_tokens_only,
            )
            reusable = same and torch.equal(evaluated.scores.token_ids, document["input_ids"][0])
            scored.append((document, evaluated, evaluated.scores.long.unsqueeze(0) if reusable else None))
    return scored


def _describe_settings(config: ScoreConfig, texts: Iterable[str]) -> dict[str, Any]:
    """Return all settings that the numbers depend on, except the model."""
    names = ("max_tokens", "add_special_tokens", "evaluator", "evaluator_add_special_tokens")
    numbers = ("context_length", "stride", "alpha", "beta", "key_token_rule")
    # The order of texts counts: it is that of the documents in the result.
    texts_hash = hashlib.sha256("".join(map(text_sha256, texts)).encode()).hexdigest()[:16]
    return {"texts": texts_hash, **{name: getattr(config, name) for name in (*names, *numbers)}}


def table(result: dict[str, Any]) -> str:
    """Format the result of `score`: its heading, and a table with a row per document and one for the corpus."""
    rows = [*result["documents"], {**result, "file": f"corpus of {len(result['documents'])}"}]
    columns = list(_COLUMNS.items())
    if "characters" not in result["alignment"]:  # it is LongPPL then
        columns = [(head, column) for head, column in columns if column[0] != "longppl_per_evaluator_token"]
    # 1. The numbers have the width that they need, and the names of documents what the terminal leaves.
    cells = [list(line) for line in zip(*(head for head, _ in columns), strict=True)]
    cells += [[_format_number(row[key], form) for _, (key, form) in columns] for row in rows]
    numbers = _align(cells)
    terminal = shutil.get_terminal_size((120, 24)).columns
    limit = max(terminal - len(numbers[0]), _MIN_NAME)
    names = ["", "document", *(_shorten(row["file"], limit) for row in rows)]
    width = max(map(len, names))
    lines = [f"{name:<{width}}{line}".rstrip() for name, line in zip(names, numbers, strict=True)]
    lines.insert(2, "-" * len(lines[1]))
    lines.insert(-1, "-" * len(lines[1]))  # above the corpus, the last row
    # 2. Longer lines are broken.
    settings = result["settings"]
    models = result["provenance"]
    heading = [
        f"model {result['model']} ({Provenance(**models['model'])})",
        describe_key_tokens(settings, Provenance(**models["evaluator"])),
    ]
    # Absent if the evaluator has no tokens with characters.
    evaluator = {kind: result.get(f"evaluator_tokens_{kind}_characters", 0) for kind in ("sharing", "without")}
    coverage = (
        f"Key tokens aligned by {result['alignment']}. Tokens that share a character:"
        f" {result['tokens_sharing_characters']:.1%} (evaluator: {evaluator['sharing']:.1%}); that cover none:"
        f" {result['tokens_without_characters']:.1%} (evaluator: {evaluator['without']:.1%})."
    )
    broken = [_break(text, terminal) for text in (*heading, coverage)]
    return "\n".join([*broken[:2], "", *lines, broken[2]])


def _format_number(value: float, form: str) -> str:
    """Return a number in its column's format, or a large one without digits that would only take space."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:{form}}"


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of right-aligned columns, each after two spaces."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["".join(f"  {cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]


def _shorten(name: str, length: int) -> str:
    """Return a name, or only its end, in which paths differ."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _break(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def measure_document(document: PackedBatch, log_likelihood: torch.Tensor, evaluated: EvaluatedDocument) -> TextBits:
    """Measure a document and its key spans in bits and bytes, by its ``[1, T]`` log-likelihoods."""
    tokens = document_tokens(document)
    scored = document["labels"][0].ne(IGNORE_INDEX)
    offsets = evaluated.scores.offsets
    return text_bits(document["text"][0], log_likelihood[0], tokens.offsets, scored, evaluated.spans, offsets)


def _describe_bits(bits: TextBits) -> dict[str, float]:
    """Return the numbers of a document or of all, what they are quotients of, and the largest error of the key bits."""
    error = bits.crossing_bits / bits.key_bytes if bits.key_bytes else math.nan
    sums = {name: getattr(bits, name) for name in ("bytes", "key_bytes", "evaluator_key_tokens")}
    return {**bits.numbers(), "key_bits_per_byte_error": error, **sums}


def _evaluate(scored_documents: list[_Scored], model: EvaluatedModel) -> dict[str, Any]:
    """Compute LongPPL and perplexity of each document and of the corpus."""
    # Not `LongPerplexity`: importing torchmetrics takes longer than scoring a short text.
    sums: dict[str, list[tuple[torch.Tensor, ...]]] = {"longppl": [], "perplexity": []}
    rows: list[dict[str, Any]] = []
    bits: list[TextBits] = []
    started = time.monotonic()
    tokens = [document["labels"].numel() for document, *_ in scored_documents]
    with show_progress(scored_documents, "model", tokens) as shown:
        for document, evaluated, reused in shown:
            # 1. Score the whole document: LongPPL has no short context of the model, only of the evaluator.
            log_likelihood = model.log_likelihood(document) if reused is None else reused
            scored = document["labels"].ne(IGNORE_INDEX)
            key = evaluated.key & scored
            row: dict[str, Any] = {"file": document["names"][0], "text_sha256": evaluated.scores.text_sha256}
            # 2. Sum over its key tokens, and over all tokens. The corpus is a mean over tokens, not over documents.
            for name, influence in (("longppl", key), ("perplexity", scored)):
                sums[name].append(_long_perplexity_update(log_likelihood, influence))
                row[name] = float(_long_perplexity_compute(*sums[name][-1]))
            bits.append(measure_document(document, log_likelihood, evaluated))
            row |= {"key_tokens": int(key.sum()), "tokens": scored.numel(), **_describe_bits(bits[-1])}
            row |= {"characters": len(document["text"][0]), "alignment": evaluated.alignment}
            rows.append(row | evaluated.coverage.fractions())
            # 3. Show the numbers when they are known, if the whole takes a while.
            if len(tokens) > 1 and time.monotonic() > started + SECONDS:
                log.info("%(file)s: %(key_tokens)d key tokens, LongPPL %(longppl).4f, perplexity %(perplexity).4f", row)
    without = sum(row["key_tokens"] == 0 for row in rows)
    if without:
        log.warning(
            "%d of %d documents have no key token: they may be too short for `context_length`, or the evaluator may"
            " not use the long context.",
            without,
            len(rows),
        )
    # 4. Add up the documents.
    totals: dict[str, Any] = {}
    for name, of_documents in sums.items():
        total, weight, largest = torch.stack([torch.stack(each) for each in of_documents]).unbind(1)
        totals[name] = float(_long_perplexity_compute(total.sum(), weight.sum(), largest.amax()))
    totals |= {name: sum(row[name] for row in rows) for name in ("key_tokens", "tokens", "characters")}
    totals |= _describe_bits(add_bits(bits))
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
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` '{name}' is not available: {str(error).splitlines()[0]}") from error


def _read_texts(files: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the files by name, and the files without text, which are skipped with a warning.

    Raises a ``ValueError`` for a file that is given twice.
    """
    places = set[Path]()
    texts = dict[str, str]()
    skipped = list[str]()
    for file in files:
        if (place := Path(file).resolve()) in places:
            raise ValueError(f"'{file}' is given twice and would count twice: give it once.")
        places.add(place)
        text = read_text(file, may_be_blank=len(files) > 1)
        if not text.strip():
            skipped.append(file)
        else:
            texts[file] = text
    if not texts:
        raise ValueError(f"All {len(files)} files are empty or only white space: pass files with text.")
    if skipped:
        log.warning("Skipped, because they are empty or only white space: %s", ", ".join(skipped))
    return texts, skipped
