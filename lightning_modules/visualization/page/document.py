"""Score a document for its page of key tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.models.progress import count_tokens, show_progress
from lightning_modules.models.tokenization.detokenization import token_texts
from lightning_modules.scoring.config import InspectConfig
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens
from lightning_modules.scoring.score import find_device
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator
from lightning_modules.visualization.page.alternatives import find_alternatives
from lightning_modules.visualization.page.page import Inspection, ModelScores


def inspect_document(
    text: str, evaluator: str, *, name: str = "document", other_models: Sequence[str] = (), **options: Any
) -> Inspection:
    """Show the key tokens of a document, and its likelihoods in long and short context, on a page.

    A notebook displays the page, and `Inspection.save` writes it to a file. ``other_models`` are evaluated next to
    ``model``, one after another, with the same settings. Options are the other fields of
    `lightning_modules.scoring.config.InspectConfig`. The evaluator's scores are stored and shared with `score`; the
    alternatives need another pass over the text.
    """
    config = InspectConfig(evaluator=evaluator, **options)
    device = find_device(config.device)
    scorer = open_evaluator(config.evaluator_config(), device=device)
    if config.max_tokens is not None:
        text = scorer.cut(text, config.max_tokens, name=name)
    names = [each for each in (config.model, *other_models) if each is not None]
    # Find errors of the models and their tokens before the evaluator is loaded.
    models = []
    for each in names:
        model = ScoredModel(
            config.model_loading(each),
            device=device,
            tokenizer=config.model_tokenizer,
            add_special_tokens=config.add_special_tokens,
        )
        models.append(model)
    documents = [model.read({name: text})[0] for model in models]
    length = scorer.encode(text, name=name)["labels"].numel()
    scored_tokens = count_tokens(length, config.short_context)
    if config.alternatives:
        scored_tokens *= 2
    with show_progress([text], "evaluator", [scored_tokens]):
        scores = scorer.scores(text, name=name)
        found = None
        if config.alternatives:
            found = find_alternatives(scorer, text, count=config.alternatives, name=name)
    scorer.release()
    shown = scores.token_ids
    if found is not None:
        shown = torch.cat([shown, found.all_token_ids()])
    ids = shown.unique().tolist()
    evaluated = []
    while models:  # each is freed before the next one is loaded
        model = models.pop(0)
        document = documents.pop(0)
        with show_progress([document], "model", [document["labels"].numel()]):
            log_likelihood = model.log_likelihood(document).float()
        tokens = document_tokens(document)
        unscored = int(document["labels"][0].eq(IGNORE_INDEX).sum())  # special tokens are all at the start
        key = find_key_tokens(scores, tokens, alpha=config.alpha, beta=config.beta).mask
        evaluated.append(ModelScores(model.name, tokens, log_likelihood, key, str(model.provenance), unscored))
    return Inspection(
        name=name,
        text=text,
        evaluator=evaluator,
        scores=scores,
        token_texts=dict(zip(ids, token_texts(scorer.tokenizer, ids), strict=True)),
        alpha=config.alpha,
        beta=config.beta,
        alternatives=found,
        models=evaluated,
        provenance=str(scorer.provenance),
    )
