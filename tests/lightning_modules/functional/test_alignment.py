import random

import pytest
import torch

from lightning_modules.functional import character_units, merge_spans, span_token_mask, transfer_influence, unit_spans
from tests.support import reference

pytestmark = pytest.mark.core


def random_offsets(generator, length=60):
    """Tokens as real tokenizers make them: mostly adjacent, some gaps, bytes of one character, empty ones."""
    offsets, end = [[0, 0]] if generator.random() < 0.5 else [], 0
    while end < length:
        start = end + generator.choice([0, 0, 0, 1])
        end = start + generator.randint(1, 5)
        offsets += [[start, end]] * generator.choice([1, 1, 1, 1, 3])
    return offsets


@pytest.mark.parametrize("seed", range(30))
def test_spans_masks_and_weights_match_loops(seed):
    generator = random.Random(seed)
    offsets, target = random_offsets(generator), random_offsets(generator)
    chosen = [span for span in offsets if generator.random() < 0.5]
    units = character_units(torch.tensor(offsets))
    assert {frozenset((units == unit).nonzero().flatten().tolist()) for unit in units} == {
        frozenset(unit) for unit in reference.character_units(offsets)
    }
    spans = merge_spans(torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2))
    assert spans.tolist() == reference.merge_spans(chosen)
    mask = span_token_mask(torch.tensor(target), spans)
    assert mask.tolist() == reference.span_token_mask(target, spans.tolist())
    influence = [5 * generator.random() for _ in offsets]
    moved = transfer_influence(torch.tensor(influence), torch.tensor(offsets), torch.tensor(target))
    expected = reference.transfer_influence(influence, offsets, target)
    torch.testing.assert_close(moved, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        *((character_units, [wrong], "offsets") for wrong in ([[0, 1, 2]], [0, 1], [[0.0, 1.0]])),
        *((span_token_mask, [[[0, 1]], wrong], "Spans must be") for wrong in ([[0, 1, 2]], [[0.0, 1.0]])),
        (transfer_influence, [[1.0, 2.0], [[0, 1]], [[0, 1]]], "`offsets`.*`influence`"),
        (transfer_influence, [[[1.0]], [[0, 1]], [[0, 1]]], "`offsets`.*`influence`"),
        (transfer_influence, [[1.0], [[0, 1]], [[0, 1, 2]]], "`target_offsets`"),
    ],
)
def test_spans_must_be_pairs_of_integers_and_one_for_each_token(function, arguments, named):
    with pytest.raises(ValueError, match=named):
        function(*map(torch.tensor, arguments))


def test_units_in_any_order_and_of_tokens_without_characters():
    offsets = torch.tensor([[4, 6], [0, 0], [0, 2], [1, 3], [3, 4], [5, 7], [9, 9]])
    units = character_units(offsets)
    assert units.tolist() == [2, 3, 0, 0, 1, 2, 4]
    assert unit_spans(offsets, units).tolist() == [[0, 3], [3, 4], [4, 7], [0, 0], [9, 9]]
    assert unit_spans(offsets[:0], units[:0]).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_unit_is_inside_as_a_whole_whatever_the_integers(dtype):
    offsets = torch.tensor([[0, 3], [3, 5], [4, 6], [6, 7], [7, 7]], dtype=dtype)
    for spans, inside in (([[0, 5]], [1, 0, 0, 0, 0]), ([[2, 2], [3, 6]], [0, 1, 1, 0, 0])):
        assert span_token_mask(offsets, torch.tensor(spans)).int().tolist() == inside
