import errno
import logging
from dataclasses import replace

import pytest
import torch

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring import scored_model as scored_model_module
from lightning_modules.scoring import token_scores
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.key_tokens import key_spans
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator, score_text
from lightning_modules.visualization.page.alternatives import find_alternatives
from tests.conftest import make_text, tiny_model
from tests.support import reference

SETTINGS = {"context_length": 32, "stride": 16}


def test_scores_match_one_window_at_a_time(model_dir):
    text, tokenizer = make_text(60, seed=5), load_tokenizer(str(model_dir))
    backbone = load_backbone(ModelConfig(str(model_dir)))
    scores = score_text(text, backbone, tokenizer, ShortContext(**SETTINGS))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    with torch.no_grad():
        long, short = reference.long_and_short(backbone.model, ids, 32, 16)
    torch.testing.assert_close(scores.long.double(), long, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(scores.short.double(), short, atol=2e-5, rtol=1e-4)
    assert scores.offsets[0].tolist() == [0, 0], "the evaluator's tokenizer adds its first token"
    assert "".join(text[a:b] for a, b in scores.offsets.tolist()) == text


def test_a_text_is_scored_once_per_process_and_per_disk(model_dir, tmp_path, monkeypatch):
    calls = []
    original = scored_model_module.score_text
    monkeypatch.setattr(scored_model_module, "score_text", lambda *a, **k: calls.append(a[0]) or original(*a, **k))
    judge = open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS))
    first = judge.scores(make_text(60))
    judge.release()
    assert judge.scores(make_text(60)) is first
    stored = open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS)).scores(make_text(60))
    assert torch.equal(stored.long, first.long)
    assert len(calls) == 1
    for other in ({"context_length": 40}, {"stride": 8}, {"add_special_tokens": False}, {"dtype": "bfloat16"}):
        open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **{**SETTINGS, **other})).scores(
            make_text(60)
        )
    assert len(calls) == 5
    open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS)).scores(make_text(61))
    assert len(calls) == 6


def test_scores_of_another_config_are_not_those_in_the_cache(model_dir, tmp_path):
    found = []
    for model_config in (None, {"rope_parameters": {"rope_theta": 100.0}}):
        for cache_dir in (tmp_path, None):
            loading = ModelConfig(str(model_dir), model_config)
            model = ScoredModel(loading, short_context=ShortContext(**SETTINGS), cache_dir=cache_dir)
            found.append(model.scores(make_text(60)).long)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


def test_special_tokens_of_the_evaluator_can_be_left_out(model_dir, tmp_path):
    config = EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS)
    with_first, without = (
        open_evaluator(replace(config, add_special_tokens=special)).scores(make_text(60)) for special in (True, False)
    )
    assert with_first.offsets[0].tolist() == [0, 0]
    assert torch.equal(without.token_ids, with_first.token_ids[1:])
    assert not torch.allclose(without.long[1:], with_first.long[2:]), "the first token is context"


def test_a_damaged_cache_file_is_scored_again(model_dir, tmp_path, caplog):
    judge = open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS))
    first = judge.scores(make_text(60))
    path = judge.path(first.text_sha256)
    path.write_bytes(path.read_bytes()[:-3])
    again = open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS)).scores(make_text(60))
    assert torch.equal(first.long, again.long)
    assert "scored again" in caplog.text


def test_a_full_disk_costs_a_second_pass_and_not_the_run(model_dir, tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    judge = open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS))
    monkeypatch.setattr(token_scores, "write_atomically", full)
    first = judge.scores(make_text(60), name="a book")
    assert judge.scores(make_text(60)) is first
    assert "'a book' could not be stored" in caplog.text


def test_tokenizer_of_another_model(model_dir, tmp_path, other_tokenizer):
    tiny_model("llama", 100).save_pretrained(tmp_path)
    judge = open_evaluator(EvaluatorConfig(str(tmp_path), tokenizer=str(model_dir), **SETTINGS))
    with pytest.raises(ValueError, match=r"Token id \d+ is beyond the embedding of 100 tokens"):
        judge.scores(make_text(60))


def test_what_is_found_can_be_changed_and_says_who_found_it(model_dir):
    judge = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS))
    scores = judge.scores(make_text(60))
    assert (scores.evaluator, scores.short_context) == (judge.identity, ShortContext(32, 16))
    for values in (scores.long, scores.short):
        assert not values.requires_grad
        values += 1.0  # which tensors of inference mode do not allow
    own = score_text(
        make_text(60), load_backbone(ModelConfig(str(model_dir))), judge.tokenizer, ShortContext(**SETTINGS)
    )
    assert not own.long.requires_grad, "the weights of a model in training do"


def test_the_alternatives_of_a_text_agree_with_its_scores(model_dir):
    judge = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS))
    scores, found = judge.scores(make_text(60)), find_alternatives(judge, make_text(60), count=len(judge.tokenizer))
    tokens = judge.encode(make_text(60))["input_ids"][0, 1:, None]
    for alternatives, expected in ((found.long, scores.long), (found.short, scores.short)):
        own = (alternatives.log_likelihood[1:] * alternatives.token_ids[1:].eq(tokens)).sum(-1)
        torch.testing.assert_close(own, expected[1:], atol=1e-5, rtol=1e-5)
    assert find_alternatives(judge, make_text(60)).long.token_ids.shape[1] == 5
    with pytest.raises(ValueError, match="'a book'"):
        judge.scores(" ", name="a book")


def test_a_model_that_cannot_be_scored_is_refused_before_its_numbers_are_kept(tokenizer, tmp_path):
    model = tiny_model("llama", len(tokenizer))
    model.lm_head.weight.data[7] = float("nan")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "damaged")
    judge = open_evaluator(EvaluatorConfig(str(tmp_path / "damaged"), cache_dir=str(tmp_path / "cache"), **SETTINGS))
    with pytest.raises(ValueError, match=r"The logits of .* are not finite"):
        judge.scores(make_text(60))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_document_of_one_token_and_one_too_short_for_a_short_context(model_dir):
    judge = open_evaluator(EvaluatorConfig(str(model_dir), add_special_tokens=False, **SETTINGS))
    for text in ("b", "bace di"):
        scores = judge.scores(text)
        assert torch.equal(scores.long, scores.short)
        assert len(key_spans(scores)) == 0


def test_key_tokens_only_cost_less_and_never_pass_for_more(model_dir, tmp_path, monkeypatch):
    calls = []
    original = scored_model_module.score_text
    monkeypatch.setattr(scored_model_module, "score_text", lambda *a, **k: calls.append(k["beta"]) or original(*a, **k))

    def make_evaluator():
        return open_evaluator(EvaluatorConfig(str(model_dir), cache_dir=str(tmp_path), **SETTINGS))

    text = make_text(60)
    first = make_evaluator()
    some = first.scores(text, beta=-5.0)
    assert some.short.isnan().any()
    assert torch.equal(make_evaluator().scores(text, beta=-5.0).long, some.long), "read from disk"
    with pytest.raises(ValueError, match="beta"):
        key_spans(some, beta=-6.0)
    with pytest.raises(ValueError, match="needs scores of all tokens"):
        some.soft_influence()
    assert calls == [-5.0]
    lower = first.scores(text, beta=-6.0)
    whole = first.scores(text)
    assert calls == [-5.0, -6.0, None]
    assert first.scores(text, beta=-5.0) is whole, "all there is to know"
    assert make_evaluator().scores(text, beta=-7.0).floor == float("-inf"), "from the whole file on disk"
    make_evaluator().path(whole.text_sha256).unlink()
    assert make_evaluator().scores(text, beta=-5.5).floor == -6.0, "a lower floor on disk serves"
    assert len(calls) == 3
    for scores, beta in ((some, -5.0), (lower, -6.0), (lower, -5.0)):
        spans = [key_spans(each, alpha=0.3, beta=beta).tolist() for each in (scores, whole)]
        assert spans[0] == spans[1]
        assert len(spans[0]) > 2


def test_the_model_is_loaded_once_until_it_is_released(model_dir, caplog):
    caplog.set_level(logging.INFO, logger=scored_model_module.__name__)
    judge = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS))
    judge.release()
    for words in (20, 30):
        judge.scores(make_text(words))
    assert caplog.text.count("Loading '") == 1
    judge.release()
    judge.scores(make_text(40))
    assert caplog.text.count("Loading '") == 2


def test_scored_tokens_are_compared_with_chance(model_dir, monkeypatch):
    """Of both products; the first token has no log-likelihood."""
    seen = []
    monkeypatch.setattr(scored_model_module, "warn_of_chance", lambda long, scored, _: seen.append(scored.tolist()))
    judge = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS))
    scores = judge.scores(make_text(60))
    judge.log_likelihood(judge.encode(make_text(60)))
    assert seen == [[False] + [True] * (len(scores.long) - 1)] * 2
