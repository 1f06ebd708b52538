"""LongPPL and perplexity of text files (``longce score``)."""

import logging
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_modules.batch import PackedBatch
from lightning_modules.models.loading.provenance import describe_key_tokens
from lightning_modules.models.progress import SECONDS, count_tokens, show_progress
from lightning_modules.scoring.config import ScoreConfig
from lightning_modules.scoring.measure import Document, measure
from lightning_modules.scoring.records import Definition, Record, Sums, summarize, write_records
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.utilities.text_files import check_output, read_text

_MIN_NAME = 12  # characters of a document's name in the table, even in a narrow terminal

log = logging.getLogger(__name__)


def score(files: str | Sequence[str] | Mapping[str, str], model: str, evaluator: str, **options: Any) -> list[Record]:
    """Measure a model on text files, with the key tokens of an evaluator.

    The evaluator is freed before the model is loaded, so they never share the accelerator. If they are the same model
    with the same tokens, the evaluator's long pass is used for both.

    Args:
        files: UTF-8 text files, one document each; or texts by their names.
        model: Hub id or local folder of the model to evaluate.
        evaluator: Hub id or local folder of the model that finds the key tokens, with any tokenizer.
        options: The other fields of `lightning_modules.scoring.config.ScoreConfig`.

    Returns:
        A record for each document with text, whose LongPPL and other numbers `summarize` reads. They are means over
        tokens, not documents, and NaN without key tokens.

    Raises:
        ValueError: If a file, a model or a number cannot be used; if possible before any model is loaded.
    """
    # 1. Read the texts, and run all checks that do not need weights.
    config = ScoreConfig(model=model, evaluator=evaluator, **options)
    texts = dict(files) if isinstance(files, Mapping) else _read_texts([files] if isinstance(files, str) else files)
    repeated = len(texts) - len(set(texts.values()))
    if repeated:
        log.warning("%d of %d documents repeat the text of another one, and are counted again.", repeated, len(texts))
    if config.output is not None:
        check_records_file(config.output)
    device = find_device(config.device)
    evaluator_model = open_evaluator(config.evaluator_config(config.key_token_rule), device=device)
    evaluated_model = ScoredModel(
        config.model_loading(model),
        device=device,
        tokenizer=config.model_tokenizer,
        add_special_tokens=config.add_special_tokens,
        trimmed_offsets=config.key_token_rule == "authors",  # a part of the rule, not of the model
    )
    # 2. Cut the texts by the evaluator's tokens, so that all models get the same ones, and tokenize them.
    if config.max_tokens is not None:
        texts = {name: evaluator_model.cut(text, config.max_tokens, name=name) for name, text in texts.items()}
    documents = evaluated_model.read(texts)
    # 3. Score all documents with the evaluator, and free it.
    scored = _score_by_evaluator(documents, evaluator_model, evaluated_model, config)
    evaluator_model.release()
    # 4. Score them with the model, and measure them by the evaluator's key tokens.
    definition = Definition(config.context_length, config.stride, config.alpha, config.beta, config.key_token_rule)
    records: list[Record] = []
    started = time.monotonic()
    tokens = [each.batch["labels"].numel() for each in scored]
    with show_progress(scored, "model", tokens) as shown:
        for each in shown:
            # The whole document: LongPPL has no short context of the model, only of the evaluator.
            long = evaluated_model.log_likelihood(each.batch) if each.long is None else each.long
            document = Document.of_row(each.batch)
            records += measure(
                document,
                long,
                each.scores,
                {"": definition},
                model=evaluated_model.source,
                evaluator=evaluator_model.source,
            )
            # Show the numbers when they are known, if the whole takes a while.
            if len(tokens) > 1 and time.monotonic() > started + SECONDS:
                own = records[-1].sums
                numbers = (document.name, own.key_tokens, own.longppl, own.perplexity)
                log.info("%s: %d key tokens, LongPPL %.4f, perplexity %.4f", *numbers)
    _warn(summarize(records))
    if config.output is not None:
        write_records(config.output, records)
    return records


class _Scored(NamedTuple):
    """A document that the evaluator has scored."""

    batch: PackedBatch
    scores: TokenScores
    long: torch.Tensor | None  # [T] log-likelihoods of the model in nats, if they are the evaluator's


def _score_by_evaluator(
    documents: Sequence[PackedBatch], evaluator: ScoredModel, model: ScoredModel, config: ScoreConfig
) -> list[_Scored]:
    # If the evaluator is the model and has read the same tokens, its long pass is also that of the model.
    # Its identity includes a context extension, which the evaluator does not have.
    same = model.provenance.identity == evaluator.provenance.identity
    beta = config.beta if config.key_tokens_only else None
    tokens = [count_tokens(document["labels"].numel(), config.short_context) for document in documents]
    scored = []
    with show_progress(documents, "evaluator", tokens) as shown:
        for document in shown:
            text, name = document["text"][0], document["names"][0]
            scores = evaluator.scores(text, name=name, beta=beta)
            if beta is not None:
                # Complete scores of some documents, which an earlier run has stored, would give soft LongPPL of these.
                scores = replace(scores, floor=beta)
            reusable = same and torch.equal(scores.token_ids, document["input_ids"][0])
            scored.append(_Scored(document, scores, scores.long if reusable else None))
    return scored


def _warn(total: Sums) -> None:
    if total.without_key_tokens:
        log.warning(
            "%d of %d documents have no key token: they may be too short for `context_length`, or the evaluator may"
            " not use the long context.",
            total.without_key_tokens,
            total.documents,
        )
    warning = total.coverage_warning()
    if warning is not None:
        log.warning(warning)


def check_records_file(output: str) -> None:
    """Raise a ``ValueError`` if records cannot be written to a file; call it before the work begins."""
    if Path(output).suffix != ".parquet":
        raise ValueError(f"`output` '{output}' must end in .parquet: records are a table with a row per document.")
    check_output(output)


# -------------------------------------------------------------------------------------------------------------- table


def table(records: Sequence[Record]) -> str:
    """Format the records of one model: a heading, and a table with a row per document and one for all of them."""
    total = summarize(records)
    rows = [(record.document, record.sums) for record in records]
    rows.append((f"corpus of {len(records)}", total))
    # 1. The numbers get the width that they need, and the names of documents the rest of the terminal.
    across_tokenizers = any(record.alignment == "characters" for record in records)
    numbers = _align([*_head(across_tokenizers), *(_cells(sums, across_tokenizers) for _, sums in rows)])
    terminal = shutil.get_terminal_size((120, 24)).columns
    limit = max(terminal - len(numbers[0]), _MIN_NAME)
    names = ["", "document", *(_shorten(name, limit) for name, _ in rows)]
    width = max(map(len, names))
    lines = [f"{name:<{width}}{line}".rstrip() for name, line in zip(names, numbers, strict=True)]
    lines.insert(2, "-" * len(lines[1]))
    lines.insert(-1, "-" * len(lines[1]))  # above the corpus, the last row
    # 2. Longer lines are broken.
    first = records[0]
    settings = {"evaluator": first.evaluator.name, **first.definition._asdict()}
    heading = [
        f"model {first.model.name} ({first.model.provenance})",
        describe_key_tokens(settings, first.evaluator.provenance),
    ]
    found = total.numbers()
    # Absent if the evaluator has no tokens with characters.
    evaluator = {kind: found.get(f"evaluator_tokens_{kind}_characters", 0) for kind in ("sharing", "without")}
    coverage = (
        f"Key tokens aligned by {', '.join(sorted({record.alignment for record in records}))}. Tokens that share a"
        f" character: {found['tokens_sharing_characters']:.1%} (evaluator: {evaluator['sharing']:.1%}); that cover"
        f" none: {found['tokens_without_characters']:.1%} (evaluator: {evaluator['without']:.1%})."
    )
    notes = [coverage]
    if total.soft_weight:  # unknown for scores of key tokens only
        number = _format_number(total.longppl_soft)
        notes.insert(0, f"Soft LongPPL, of all tokens weighted by the evaluator's soft influence: {number}.")
    broken = [_break(text, terminal) for text in (*heading, *notes)]
    return "\n".join([*broken[:2], "", *lines, *broken[2:]])


def _head(across_tokenizers: bool) -> list[list[str]]:
    """Return the two lines of the head; without another tokenizer, LongPPL per token of the evaluator is LongPPL."""
    first = ["", "key", "", "per eval.", "", "key bits", "bits"]
    second = ["tokens", "tokens", "LongPPL", "token", "perplexity", "/byte", "/byte"]
    if not across_tokenizers:
        del first[3], second[3]
    return [first, second]


def _cells(sums: Sums, across_tokenizers: bool) -> list[str]:
    """Return the numbers of a row of the table."""
    cells = [f"{sums.tokens + sums.unscored:,}", f"{sums.key_tokens:,}", _format_number(sums.longppl)]
    if across_tokenizers:
        cells.append(_format_number(sums.longppl_per_evaluator_token))
    return cells + [_format_number(each) for each in (sums.perplexity, sums.key_bits_per_byte, sums.bits_per_byte)]


def _format_number(value: float) -> str:
    """Return a number with four digits, or a large one without digits that would only take space."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4f}"


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of right-aligned columns, each after two spaces."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = map(str.rjust, row, widths)
        lines.append("  " + "  ".join(padded))
    return lines


def _shorten(name: str, length: int) -> str:
    """Return a name, shortened to its end, where paths differ."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _break(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def find_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` '{name}' is not available: {str(error).splitlines()[0]}") from error


def _read_texts(files: Sequence[str]) -> dict[str, str]:
    """Return the texts of the files by name; those without text are skipped with a warning.

    Raises a ``ValueError`` for a file that is given twice.
    """
    places = set[Path]()
    texts = dict[str, str]()
    skipped = list[str]()
    for file in files:
        place = Path(file).resolve()
        if place in places:
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
    return texts
