import pytest
import torch

from lightning_modules.functional import merge_spans
from lightning_modules.functional.windows import ShortContext
from lightning_modules.scoring.key_tokens import key_spans
from lightning_modules.scoring.token_scores import TokenScores, read_key_spans, text_sha256


@pytest.fixture
def scores():
    torch.manual_seed(0)
    ends = torch.randint(1, 6, (50,)).cumsum(0)
    long = -4 * torch.rand(50)
    return TokenScores(
        text_sha256=text_sha256("text"),
        evaluator="judge@1",
        context_length=8,
        stride=4,
        token_ids=torch.arange(50),
        offsets=torch.stack([torch.cat([ends.new_zeros(1), ends[:-1]]), ends], dim=1),
        long=long,
        short=torch.where(torch.arange(50) < 12, long, long - 5 * torch.rand(50)),
    )


def test_comes_back_as_it_was(scores, tmp_path):
    scores.save(tmp_path / "deep" / "scores.safetensors")
    loaded = TokenScores.load(tmp_path / "deep" / "scores.safetensors")
    for name in ("token_ids", "offsets", "long", "short"):
        assert torch.equal(getattr(loaded, name), getattr(scores, name))
    assert (loaded.text_sha256, loaded.evaluator) == (scores.text_sha256, scores.evaluator)
    assert loaded.short_context == ShortContext(8, 4)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["scores.safetensors"]


def test_thresholds_are_applied_afterwards(scores):
    key = (scores.long - scores.short > 1.0) & (scores.long > -3.0)
    assert key.any()
    assert key_spans(scores, alpha=1.0, beta=-3.0).tolist() == merge_spans(scores.offsets[key]).tolist()
    assert len(key_spans(scores, alpha=100.0)) == 0
    assert float(scores.soft_influence(gamma=2.0).max()) == 2.0


def test_every_flipped_byte_and_every_cut_is_noticed(scores, tmp_path):
    path = tmp_path / "scores.safetensors"
    scores.save(path)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"scores\.safetensors"):
            TokenScores.load(path)
    for length in (0, 7, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"scores\.safetensors"):
            TokenScores.load(path)


def test_key_spans_of_the_authors(tmp_path):
    path = tmp_path / "spans.txt"
    path.write_text("[3, 9];[12, 13];[13, 20]")
    assert read_key_spans(path).tolist() == [[3, 9], [12, 20]]
    path.write_text("")
    assert read_key_spans(path).shape == (0, 2)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2];__import__('os').system('touch hacked')",
        "[5, 3]",
        "[1, 2];;[3, 4]",
    ],
)
def test_what_is_no_span_is_refused_and_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spans.txt").write_text(text)
    with pytest.raises(ValueError, match=r"spans\.txt"):
        read_key_spans(tmp_path / "spans.txt")
    assert not (tmp_path / "hacked").exists()


def test_a_floor_survives_the_file(tmp_path):
    scores = TokenScores(
        "0" * 64,
        "model",
        4,
        2,
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64),
        *torch.tensor([[-1.0, -3.0, -2.0], [-2.0, torch.nan, -4.0]]),
        floor=-2.5,
    )
    scores.save(tmp_path / "scores")
    loaded = TokenScores.load(tmp_path / "scores")
    assert loaded.floor == -2.5
    assert loaded.short[1].isnan()
