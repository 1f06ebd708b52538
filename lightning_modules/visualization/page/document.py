"""A document as an evaluator sees it: which of its tokens need the far context, to be looked at."""

from typing import Any

import torch

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.checks import check_count
from lightning_modules.functional.influence import check_thresholds
from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.loading import DType, load_config
from lightning_modules.models.tokenization.detokenization import token_texts
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.evaluator import Evaluator
from lightning_modules.scoring.key_tokens import document_tokens
from lightning_modules.scoring.score import ScoredModel, check_vocabulary, find_device
from lightning_modules.visualization.page.page import EvaluatedModel, Inspection

MOST_ALTERNATIVES = 20
"""At 128k tokens each takes more than a megabyte of the page, and nobody reads so many."""


def inspect_document(
    text: str,
    evaluator: str,
    *,
    name: str = "document",
    model: str | None = None,
    context_length: int = 4096,
    stride: int = 1024,
    alpha: float = 2.0,
    beta: float = -2.0,
    alternatives: int = 5,
    max_tokens: int | None = None,
    add_special_tokens: bool = False,
    evaluator_add_special_tokens: bool = True,
    dtype: DType = "auto",
    attn_implementation: str = "auto",
    device: str = "auto",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """A document as a page: its key tokens, and what the long and the short context say of each token.

    In the page alpha and beta can be moved. The evaluator's scores are kept as those of `score` are, and are shared
    with it; the alternatives, which are not kept, take another pass of it over the text.

    Args:
        text: The document.
        evaluator: Hub id or local folder of the model that picks the key tokens.
        name: How the page cites the document.
        model: Hub id or local folder of a model to be judged by the key tokens; any tokenizer.
        context_length: Length K of the shortest short context, in the evaluator's tokens.
        stride: Number d of tokens that share one short window.
        alpha: A key token's long-short difference exceeds it, in nats; the page begins with it.
        beta: A key token's long log-likelihood exceeds it, in nats; the page begins with it.
        alternatives: How many of the likeliest tokens to show at each token, given the long and the short context; 0
            saves the evaluator's second pass over the text, and half or more of the size of the page.
        max_tokens: Tokens of the document to keep, as the evaluator counts them; all by default.
        add_special_tokens: Whether the model's tokenizer adds its own; off, as in the code of the paper's authors.
        evaluator_add_special_tokens: Whether the evaluator's tokenizer adds its own; on, as in their code.
        dtype: Of the weights of both; ``auto`` keeps the stored one.
        attn_implementation: Of both, as in transformers; ``auto`` is flash attention where it is installed.
        device: Such as ``cuda:0`` or ``cpu``; ``auto`` is the first GPU, if there is one.
        cache_dir: Folder of the evaluator's stored scores; by default in ``$LONGCE_CACHE`` or ``~/.cache/longce``.
        trust_remote_code: Run code from the models' repositories; off unless you trust it.

    Returns:
        The page to be: it shows itself in a notebook, and `Inspection.save` writes it.

    Raises:
        ValueError: If the text, a model or a number cannot be used; before any model is loaded, where that can be
            known.
    """
    check_thresholds(alpha, beta)
    check_count("`alternatives`", alternatives, least=0, most=MOST_ALTERNATIVES)
    if max_tokens is not None:
        check_count("`max_tokens`", max_tokens)
    place = find_device(device)
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    settings["trust_remote_code"] = trust_remote_code
    judge = Evaluator(
        evaluator,
        context_length=context_length,
        stride=stride,
        add_special_tokens=evaluator_add_special_tokens,
        cache_dir=cache_dir,
        **settings,
    )
    check_weight_files(evaluator)
    text = judge.encode(text, name=name, max_tokens=max_tokens)["text"][0]
    document = None if model is None else _read_by(model, text, name, add_special_tokens, trust_remote_code)
    scores = judge.scores(text, device=place, name=name)
    found = judge.alternatives(text, count=alternatives, device=place, name=name) if alternatives else None
    judge.release()
    ids = torch.cat([scores.token_ids, *(part.token_ids.flatten() for part in found or ())]).unique().tolist()
    return Inspection(
        name=name,
        text=text,
        evaluator=evaluator,
        scores=scores,
        token_texts=dict(zip(ids, token_texts(judge.tokenizer, ids), strict=True)),
        alpha=alpha,
        beta=beta,
        alternatives=found,
        model=None if model is None or document is None else _evaluated(document, ScoredModel(model, place, settings)),
    )


def _read_by(model: str, text: str, name: str, add_special_tokens: bool, trust_remote_code: bool) -> PackedBatch:
    """The document in the tokens of the model to be judged, which is found to be there, and to know them."""
    config = load_config(model, trust_remote_code=trust_remote_code)
    check_weight_files(model)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    document = encode_document(text, tokenizer, name=name, add_special_tokens=add_special_tokens)
    check_vocabulary([document], config, model)
    return document


def _evaluated(document: PackedBatch, model: ScoredModel) -> EvaluatedModel:
    return EvaluatedModel(model.name, document_tokens(document), model.log_likelihood(document)[0].float())
