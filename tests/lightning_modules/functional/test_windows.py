import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import Window, short_context_windows
from lightning_modules.functional.windows import ShortContext, batch_windows, trim_windows, window_batch

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("context_length", "stride"), [(1, 1), (4, 3), (3, 4), (8, 8), (5, 30)])
def test_every_token_behind_the_first_window_is_scored_once_with_a_short_context(context_length, stride):
    for n in range(1, 40):
        windows = short_context_windows([0, n], ShortContext(context_length, stride))
        scored = [t for window in windows for t in range(window.scored, window.stop)]
        assert scored == list(range(context_length + stride, n)), n
        for window in windows:
            for t in range(window.scored, window.stop):
                assert context_length <= t - window.start < context_length + stride


@pytest.mark.parametrize(("lengths", "named"), [((4, 3, 7), r"4 \+ 3 = 7"), ((0, 3), r"\(K\)"), ((4, 0), r"\(d\)")])
def test_a_context_that_is_never_short_is_refused(lengths, named):
    ShortContext(4, 3).check_sequence(8)
    with pytest.raises(ValueError, match=named):
        ShortContext(*lengths[:2]).check_sequence(*lengths[2:])


def test_window_batch():
    tokens = torch.arange(100, 122).reshape(2, 11)
    labels = tokens.clone()
    labels[:, 0] = labels[1, 8] = IGNORE_INDEX
    rows = PackedBatch(
        input_ids=tokens,
        labels=labels,
        position_ids=torch.arange(11).expand(2, 11),
        document_boundaries=[[0, 11], [0, 11]],
        scored=labels.ne(IGNORE_INDEX).numpy(),
    )
    batch = window_batch(rows, [(0, Window(3, 7, 10)), (1, Window(6, 8, 11)), (1, Window(8, 10, 11))])
    ignore = IGNORE_INDEX
    assert batch["input_ids"][0].tolist() == [103, 104, 105, 106, 107, 108, 109]
    assert batch["labels"][0].tolist() == [ignore] * 4 + [107, 108, 109]
    assert batch["input_ids"][1, :5].tolist() == [117, 118, 119, 120, 121]
    assert batch["labels"][1].tolist() == [ignore, ignore, ignore, 120, 121, ignore, ignore]
    assert batch["labels"][2].tolist() == [ignore, ignore, 121, ignore, ignore, ignore, ignore]
    assert batch["position_ids"].tolist() == [list(range(7))] * 3
    assert batch["document_boundaries"] == [[0, 7], [0, 5], [0, 3]]
    assert batch["scored"].tolist() == batch["labels"].ne(ignore).tolist()


WINDOWS = batch_windows([[0, 9, 40], [0, 30]], ShortContext(4, 2))


def test_windows_of_a_batch_name_their_rows():
    assert WINDOWS[0] == (0, Window(2, 6, 8))
    assert [window for row, window in WINDOWS if row == 1] == short_context_windows([0, 30], ShortContext(4, 2))


def test_trimmed_windows_score_every_wanted_token_and_end_at_the_last():
    wanted = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.8
    trimmed = trim_windows(WINDOWS, wanted)
    before, after = (
        {(row, t) for row, window in windows for t in range(window.scored, window.stop) if wanted[row, t]}
        for windows in (WINDOWS, trimmed)
    )
    assert before == after
    assert len(trimmed) < len(WINDOWS)
    for row, window in trimmed:
        assert wanted[row, window.stop - 1]
        assert (row, window.start, window.scored) in {(r, w.start, w.scored) for r, w in WINDOWS}
