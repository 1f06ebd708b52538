"""What is written to TensorBoard: which pictures, tables and histograms, under which tags."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.functional import key_token_mask
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.visualization.tensorboard.figures import benefit_figure, position_figure
from lightning_modules.visualization.tensorboard.image import token_image
from lightning_modules.visualization.tensorboard.markdown import excerpts_markdown, helped_markdown, learned_markdown
from lightning_modules.visualization.tensorboard.scored_document import ScoredDocument
from lightning_modules.visualization.tensorboard.sums import BenefitCounts, PositionSums


def draw_documents(
    writer: Any, documents: Sequence[ScoredDocument], *, scored_by: str, tokens: int, step: int, text: bool
) -> None:
    """Documents in colours and as text, and their most helped tokens.

    Args:
        writer: A ``SummaryWriter``.
        documents: With the scores of one model.
        scored_by: That model: ``evaluator`` or ``model``.
        tokens: Shown of each document, at most.
        step: Optimizer steps so far.
        text: Whether to write the running text, too, which pictures of later steps need no second time.
    """
    for number, document in enumerate(documents):
        name = f"key_tokens/{slug(document, number)}"
        key_tokens = f"{int(document.key.sum())} key tokens of {len(document.key):,}"
        title = f"{document.name}: {key_tokens}; by the {scored_by}"
        image = token_image(document, tokens=tokens, title=f"{title}, step {step:,}" if scored_by == "model" else title)
        writer.add_image(f"{name}/{scored_by}", image, step, dataformats="HWC")
        if text:
            markdown = excerpts_markdown(document, tokens=tokens, title=title)
            writer.add_text(f"{name}/{scored_by}", markdown, step)
    writer.add_text(f"most_helped_tokens/{scored_by}", helped_markdown(documents), step)


def draw_learned(
    writer: Any,
    documents: Sequence[tuple[ScoredDocument, Tensor, int]],
    judged: Sequence[ScoredDocument | None],
    *,
    step: int,
) -> None:
    """How likely the model finds key tokens now, and did at first.

    Args:
        writer: A ``SummaryWriter``.
        documents: With the scores of the model, its first long log-likelihoods ``[N]`` in nats, and their step.
        judged: The same documents with the scores of the evaluator; None where there are none.
        step: Optimizer steps so far.
    """
    for number, ((document, first, then), judge) in enumerate(zip(documents, judged, strict=True)):
        table = learned_markdown(document, first, then=then, judge=judge)
        writer.add_text(f"key_tokens/{slug(document, number)}/learned", table, step)
    values = torch.cat([document.long[document.key] for document, *_ in documents])
    if len(values):
        writer.add_histogram("key_tokens/model_log_likelihood_nats", values, step)


def draw_scores(
    writer: Any, scores: Iterable[TokenScores], *, alpha: float, beta: float, scored_by: str, step: int
) -> None:
    """Long-short difference and log-likelihood of the tokens of all documents, and their loss by context.

    Args:
        writer: A ``SummaryWriter``.
        scores: Of one model; nothing of them is kept. Tokens without a short context are not compared.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        scored_by: That model: ``evaluator`` or ``model``.
        step: Optimizer steps so far.
    """
    benefit, positions, documents = BenefitCounts(), PositionSums(3), 0
    for pair in scores:
        long, short = pair.long[1:], pair.short[1:]  # the first token has no context to be scored in
        key = key_token_mask(long, short, alpha=alpha, beta=beta)
        benefit.add(long, short)
        positions.add(torch.arange(1, len(long) + 1), -long, -short, key)
        documents += 1
    title = f"{scored_by}, {documents:,} documents"
    if benefit.counts.any():
        figure = benefit_figure(benefit, alpha=alpha, beta=beta, title=title)
        writer.add_image(f"lsd_and_lcl/{scored_by}", figure, step, dataformats="HWC")
    if positions.sums[0].any():
        figure = position_figure(positions, title=title, short=1, key_share=2)
        writer.add_image(f"loss_by_context/{scored_by}", figure, step, dataformats="HWC")


def draw_weights(writer: Any, weights: Tensor, differences: Tensor, *, cap: float | None, step: int) -> None:
    """Histograms of a sample of the tokens of one optimizer step.

    Args:
        writer: A ``SummaryWriter``.
        weights: ``[N]`` token weights.
        differences: ``[M]`` long-short differences of the model in training, in nats.
        cap: Largest weight; None without one.
        step: Optimizer steps so far.
    """
    if len(weights):
        # TensorBoard's own bins grow by 10 %: too coarse for weights that lie between 0 and 5.
        bins = "tensorflow" if cap is None or weights.min() < 0 else torch.linspace(0, cap * 1.0001, 51).tolist()
        writer.add_histogram("train/token_weights", weights, step, bins=bins)
    if len(differences):
        writer.add_histogram("train/lsd_nats", differences, step)


def slug(document: ScoredDocument, number: int) -> str:
    """Part of a tag that names a document among others."""
    return f"{number}_{re.sub(r'[^-.A-Za-z0-9]+', '_', document.name)[:40]}"
