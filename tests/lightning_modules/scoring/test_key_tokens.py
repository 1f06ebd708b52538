import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longppl.longppl import cal_overlap, merge_intervals

from lightning_modules.functional import merge_touching_spans, scan_token_mask, transfer_influence
from lightning_modules.models.tokenization.tokenizer import (
    encode_document,
    load_tokenizer,
    tokenizer_hash,
    untrim_offsets,
)
from lightning_modules.scoring.key_tokens import (
    Tokens,
    compare_key_spans,
    count_coverage,
    document_tokens,
    find_key_tokens,
    key_spans,
    transfer_soft_influence,
)
from lightning_modules.scoring.token_scores import TokenScores
from tests.support import reference
from tests.support.texts import LANGUAGES, TOKENIZERS, text_of

pytestmark = pytest.mark.core

THRESHOLDS = {"alpha": 0.5, "beta": -3.0}


@pytest.fixture(scope="module")
def tokenizers():
    found = {name: make() for name, make in TOKENIZERS.items()}
    for tokenizer in found.values():
        untrim_offsets(tokenizer)
    return found


def read(text, tokenizer, *, add_special_tokens=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown tokens
        return document_tokens(encode_document(text, tokenizer, add_special_tokens=add_special_tokens))


def random_scores(tokens, seed=0):
    """As likely to be key as not, and runs of key tokens are common."""
    generator = torch.Generator().manual_seed(seed)
    long = -torch.rand(len(tokens.ids), generator=generator)
    short = long - 1.5 * torch.rand(len(tokens.ids), generator=generator)
    return TokenScores("", "", 8, 4, *tokens, long, short)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("evaluator", TOKENIZERS)
def test_every_pair_of_tokenizers_matches_the_slow_definition(evaluator, language, tokenizers):
    text = text_of(language, words=12)
    scores = random_scores(read(text, tokenizers[evaluator], add_special_tokens=True))
    shares = []
    for model, tokenizer in tokenizers.items():
        tokens = read(text, tokenizer)
        found = find_key_tokens(scores, tokens, **THRESHOLDS)
        values = [part.tolist() for part in (scores.token_ids, scores.offsets, scores.long, scores.short, *tokens)]
        assert found.mask.tolist() == reference.key_tokens(*values, *THRESHOLDS.values()), model
        shares.append(found.mask.double().mean())
        if model == evaluator:
            assert found.alignment == "tokens"
    assert 0 < min(shares) < 1


def test_the_same_tokens_keep_mask_and_influence_also_where_they_share_characters(tokenizers):
    tokens = read(text_of("cjk"), tokenizers["byte_level"])
    assert count_coverage(tokens.offsets).sharing > 100
    scores = random_scores(tokens)
    key = (scores.long - scores.short > 0.5) & (scores.long > -3.0)
    soft = scores.soft_influence().double()
    assert torch.equal(find_key_tokens(scores, **THRESHOLDS).mask, key)
    assert torch.equal(find_key_tokens(scores, tokens, **THRESHOLDS).mask, key)
    assert torch.equal(transfer_soft_influence(scores, tokens), soft)
    assert transfer_soft_influence(scores, tokens).dtype == torch.float64
    special = Tokens(torch.cat([torch.tensor([0]), tokens.ids]), torch.cat([torch.zeros(1, 2).long(), tokens.offsets]))
    with_special = find_key_tokens(scores, special, **THRESHOLDS)
    assert with_special.alignment == "tokens"
    assert with_special.mask.tolist() == [False, *key.tolist()]
    assert transfer_soft_influence(scores, special).tolist() == [0.0, *soft.tolist()]


def test_other_ids_or_other_characters_are_other_tokens():
    one = Tokens(torch.tensor([1, 2]), torch.tensor([[0, 1], [1, 3]]))
    scores = TokenScores("", "", 8, 4, *one, torch.tensor([-0.1, -0.1]), torch.tensor([-0.1, -3.0]))
    for ids, offsets in (([1, 3], [[0, 1], [1, 3]]), ([1, 2], [[0, 1], [1, 2]])):
        other = Tokens(torch.tensor(ids), torch.tensor(offsets))
        assert find_key_tokens(scores, other).alignment == "characters"
        influence = transfer_influence(scores.soft_influence(), scores.offsets, other.offsets)
        assert torch.equal(transfer_soft_influence(scores, other), influence)


def test_a_unit_is_key_by_its_summed_likelihoods():
    """One letter of two tokens: neither passes the thresholds alone, or one of them alone does."""
    offsets, whole = (
        torch.tensor([[0, 1], [1, 2], [1, 2]]),
        Tokens(torch.tensor([9, 8]), torch.tensor([[0, 1], [1, 2]])),
    )
    for gains, expected in (((0.3, 0.3), True), ((0.6, -0.3), False), ((2.0, -0.2), True)):
        long = torch.tensor([-0.1, -0.1, -0.1])
        scores = TokenScores("", "", 8, 4, torch.arange(3), offsets, long, long - torch.tensor([0.0, *gains]))
        assert find_key_tokens(scores, whole, **THRESHOLDS).mask.tolist() == [False, expected]
    unlikely = TokenScores(
        "", "", 8, 4, torch.arange(3), offsets, torch.tensor([0, -2.0, -2.0]), torch.full((3,), -9.0)
    )
    assert find_key_tokens(unlikely, whole, **THRESHOLDS).mask.tolist() == [True, False]


SPAN = st.tuples(st.integers(0, 14), st.integers(0, 3)).map(lambda pair: [pair[0], sum(pair)])


@given(st.lists(SPAN, max_size=8), st.lists(SPAN, max_size=8).map(sorted))
def test_the_rule_of_the_authors_is_their_code(tokens, key):
    key, tokens = (torch.tensor(part, dtype=torch.int64).reshape(-1, 2) for part in (key, tokens))
    spans = merge_touching_spans(key)
    assert spans.tolist() == merge_intervals(key).tolist()
    theirs = cal_overlap(tokens.tolist(), spans.tolist())
    assert scan_token_mask(tokens, spans).nonzero().squeeze(-1).tolist() == [token + 1 for token in theirs]


@pytest.mark.parametrize("name", ["byte_level_trimmed", "roberta_trimmed"])
def test_trimmed_offsets_are_made_whole_when_a_tokenizer_is_loaded(name, tmp_path):
    make = {"byte_level_trimmed": "byte_level"}.get(name)
    TOKENIZERS[name]().save_pretrained(tmp_path)
    trimmed, whole = (load_tokenizer(str(tmp_path), trimmed_offsets=trimmed) for trimmed in (True, False))
    text = "in the  report\n\n  says   the"
    for add_special_tokens in (False, True):
        before, after = (read(text, tokenizer, add_special_tokens=add_special_tokens) for tokenizer in (trimmed, whole))
        assert torch.equal(before.ids, after.ids)
        assert count_coverage(before.offsets).without > 0
        assert count_coverage(after.offsets).without == 0
        inner = [span for span in after.offsets.tolist() if span[0] < span[1]]
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(inner)), "every character belongs to one"
        assert (inner[0][0], inner[-1][1]) == (0, len(text))
    if make is not None:
        untrimmed = TOKENIZERS[make]()
        assert tokenizer_hash(whole) == tokenizer_hash(untrimmed), "no trace of the trimming is left"


def test_a_cut_text_is_read_again_and_no_character_is_cut_in_two(tokenizers):
    tokenizer = tokenizers["byte_level"]
    text = text_of("emoji")
    for tokens in range(2, 60):
        document = encode_document(text, tokenizer, max_tokens=tokens)
        kept = document["text"][0]
        assert text.startswith(kept)
        assert (
            document["input_ids"][0].tolist() == tokenizer.backend_tokenizer.encode(kept, add_special_tokens=False).ids
        )
        assert tokens - 4 < document["input_ids"].numel() <= tokens
        assert document["offsets"].max() == len(kept)


def test_how_tokens_cover_characters():
    offsets = torch.tensor([[0, 0], [0, 2], [2, 3], [2, 3], [3, 3], [3, 5], [5, 5]])
    assert count_coverage(offsets) == (5, 2, 1), "special tokens around the text do not count"
    assert count_coverage(torch.zeros(3, 2, dtype=torch.int64)) == (0, 0, 0)


def test_scores_known_from_a_floor_on_answer_no_lower_threshold():
    tokens = Tokens(torch.tensor([1, 2]), torch.tensor([[0, 1], [1, 3]]))
    scores = TokenScores("", "", 8, 4, *tokens, torch.zeros(2), torch.zeros(2), floor=-2.0)
    assert find_key_tokens(scores, tokens, beta=-2.0).alignment == "tokens"
    for ask in (find_key_tokens, key_spans):
        with pytest.raises(ValueError, match=r"`beta` of -2\.0 or above, got -2\.5"):
            ask(scores, beta=-2.5)


def test_tokens_of_a_padded_row():
    ids = torch.arange(10).reshape(2, 5)
    offsets = torch.stack([ids, ids + 1], dim=-1)
    batch = {"input_ids": ids, "offsets": offsets, "document_boundaries": [[0, 3], [0, 5]]}
    assert document_tokens(batch).ids.tolist() == [0, 1, 2]
    assert document_tokens(batch, 1).offsets.tolist() == offsets[1].tolist()
    packed = {**batch, "document_boundaries": [[0, 2, 4], [0, 5]]}
    assert document_tokens(packed).ids.tolist() == [0, 1, 2, 3], "all that is no padding"


def test_two_evaluators_agree_on_the_characters_of_both():
    spans = torch.tensor([[0, 4], [10, 12]])
    assert compare_key_spans(spans, spans) == 1.0
    assert compare_key_spans(spans, torch.tensor([[2, 8]])) == 2 / 10
    assert math.isnan(compare_key_spans(spans[:0], spans[:0]))
    assert compare_key_spans(spans, spans[:0]) == 0
