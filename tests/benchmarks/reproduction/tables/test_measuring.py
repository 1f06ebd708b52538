import math

import pytest
import torch

from benchmarks.reproduction.tables.measuring import influences, select_documents, threshold_name, weighted_sums
from datamodules.sources.documents import Document
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.key_tokens import document_tokens
from lightning_modules.scoring.token_scores import TokenScores
from tests.conftest import make_text


def lengths(texts, tokenizer):
    return [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def test_the_first_documents_that_are_long_enough_are_cut(tokenizer):
    source = [Document(str(number), make_text(words, seed=number)) for number, words in enumerate((10, 90, 20, 60, 70))]
    chosen = select_documents(iter(source), tokenizer, count=2, min_tokens=100, max_tokens=150)
    assert [text.name for text in chosen] == ["1", "3"]
    assert all(source[int(document.name)].text.startswith(document.text) for document in chosen)
    assert lengths([chosen[0].text], tokenizer) == [150]
    assert all(100 <= length <= 150 for length in lengths([document.text for document in chosen], tokenizer))


def test_influences_token_by_token(tokenizer, other_tokenizer):
    text = make_text(60, seed=3) + " " + make_text(12, seed=3)
    document = encode_document(text, tokenizer)
    ids, offsets = document_tokens(encode_document(text, other_tokenizer))
    generator = torch.Generator().manual_seed(0)
    long = -4 * torch.rand(len(offsets), generator=generator)
    short = long - 4 * torch.rand(len(offsets), generator=generator)
    scores = TokenScores("", "", 48, 16, ids, offsets, long, short)
    found = influences(document, scores, gamma=5.0)
    owner = {position: token for token, (start, end) in enumerate(offsets.tolist()) for position in range(start, end)}
    scored = (document["labels"] != IGNORE_INDEX)[0]
    for token, (start, end) in enumerate(document["offsets"][0].tolist()):
        owners = [owner.get(position) for position in range(start, end)]
        soft = [1.0 if one is None else min(math.exp(long[one] - short[one]), 5.0) for one in owners]
        expected = sum(soft) / len(soft) if scored[token] else 0.0
        assert float(found["soft"][0, token]) == pytest.approx(expected, rel=1e-5)
        for alpha, beta in ((2.0, -2.0), (1.0, -1.0), (2.0, -math.inf)):
            key = all(
                one is not None and float(long[one] - short[one]) > alpha and float(long[one]) > beta for one in owners
            )
            assert bool(found[threshold_name(alpha, beta)][0, token]) == (key and bool(scored[token]))
    assert found["perplexity"].equal(document["labels"] != IGNORE_INDEX)
    assert 5 < int(found["ngram"].sum()) < int(scored.sum()) / 2
    assert int(found["alpha=2 beta=-2"].sum()) > 5
    assert set(found) == {"perplexity", "ngram", "soft"} | {
        *(f"alpha={a} beta={b}" for a in (1, 2) for b in (-1, -2)),
        "alpha=2 without LCL",
    }


def test_sums_are_exact():
    log_likelihood = torch.full((1, 3), -(2.0**24))
    weights = {"a": torch.tensor([[True, True, True]]), "b": torch.tensor([[0.0, 0.5, 2**-30]], dtype=torch.float64)}
    sums = weighted_sums(log_likelihood, weights)
    assert sums["a"] == (-3 * 2.0**24, 3.0)
    assert sums["b"] == (-(2.0**23) - 2**-6, 0.5 + 2**-30)
