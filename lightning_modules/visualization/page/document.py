"""Score a document for its page of key tokens."""

from typing import Any

import torch

from lightning_modules.models.tokenization.detokenization import token_texts
from lightning_modules.scoring.config import InspectConfig
from lightning_modules.scoring.evaluator import Evaluator
from lightning_modules.scoring.key_tokens import document_tokens
from lightning_modules.scoring.score import EvaluatedModel, find_device
from lightning_modules.visualization.page.page import Inspection, ModelScores


def inspect_document(text: str, evaluator: str, *, name: str = "document", **options: Any) -> Inspection:
    """Show the key tokens of a document, and its likelihoods in long and short context, on a page.

    A notebook displays the page, and `Inspection.save` writes it to a file. Options are the other fields of
    `lightning_modules.scoring.config.InspectConfig`. The evaluator's scores are stored and shared with `score`; the
    alternatives need another pass over the text.
    """
    config = InspectConfig(evaluator=evaluator, **options)
    device = find_device(config.device)
    scorer = Evaluator(config.evaluator_config())
    text = scorer.encode(text, name=name, max_tokens=config.max_tokens)["text"][0]
    model = (
        None if config.model is None else EvaluatedModel(config.loading(config.model), device, config.model_tokenizer)
    )
    # Find errors of the model and its tokens before the evaluator is loaded.
    document = None if model is None else model.read({name: text}, add_special_tokens=config.add_special_tokens)[0]
    scores = scorer.scores(text, device=device, name=name)
    found = None
    if config.alternatives:
        found = scorer.alternatives(text, count=config.alternatives, device=device, name=name)
    scorer.release()
    ids = torch.cat([scores.token_ids, *(part.token_ids.flatten() for part in found or ())]).unique().tolist()
    evaluated = None
    if model is not None and document is not None:
        log_likelihood = model.log_likelihood(document)[0].float()
        tokens = document_tokens(document)
        key = scorer.evaluate(text, tokens, device=device, name=name).key
        evaluated = ModelScores(model.name, tokens, log_likelihood, key, str(model.provenance))
    return Inspection(
        name=name,
        text=text,
        evaluator=evaluator,
        scores=scores,
        token_texts=dict(zip(ids, token_texts(scorer.tokenizer, ids), strict=True)),
        alpha=config.alpha,
        beta=config.beta,
        alternatives=found,
        model=evaluated,
        provenance=str(scorer.provenance(device)),
    )
