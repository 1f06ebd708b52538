import pytest
import torch

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.harness.scoring import Continuation, score_continuations
from tests.conftest import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", 60, seed=3).double()


def reference(model, context, tokens):
    """One token at a time."""
    ids, total, greedy = list(context), 0.0, True
    for token in tokens:
        logits = model(torch.tensor([ids])).logits[0, -1].detach()
        total += float(logits.log_softmax(0)[token])
        greedy &= int(logits.argmax()) == token
        ids.append(token)
    return total, greedy


def questions(model):
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(60, (count,), generator=generator).tolist()

    shared = draw(9)
    asked = [Continuation(draw(length), draw(count)) for length, count in [(1, 1), (40, 3), (5, 12), (17, 1), (2, 0)]]
    asked += [Continuation(shared, [token]) for token in range(6)]  # the choices of a question
    asked += [Continuation(shared[:7], [*shared[7:], 4])]  # the same text, of which more is asked
    context = draw(11)
    likely = model.generate(torch.tensor([context]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    asked.append(Continuation(context, likely[0, 11:].tolist()))
    return asked


@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_matches_one_token_at_a_time(model, batch_tokens):
    backbone, asked = Backbone(model), questions(model)
    passes = []
    model.get_decoder().register_forward_hook(lambda _, __, output: passes.append(output.last_hidden_state.shape))
    found = score_continuations(backbone, asked, batch_tokens=batch_tokens)
    used = list(passes)
    for score, question in zip(found, asked, strict=True):
        total, greedy = reference(model, *question)
        assert score.log_likelihood == pytest.approx(total, abs=1e-9)
        assert score.is_greedy == greedy
    assert found[-1].is_greedy
    assert sum(score.is_greedy for score in found) < len(found)
    assert all(rows * length <= max(batch_tokens, 42) for rows, length, _ in used)
    assert sum(rows for rows, _, _ in used) == 6  # the seven about one text share a row; one asks nothing


def test_modes_come_back_and_dropout_is_off():
    model = tiny_model("llama", 60, attention_dropout=0.5).train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    asked = [Continuation([1, 2, 3], [4, 5])]
    assert score_continuations(Backbone(model), asked) == score_continuations(Backbone(model), asked)
    assert [module.training for module in model.modules()] == modes


def test_bad_input_is_refused(model):
    backbone = Backbone(model)
    with pytest.raises(ValueError, match="Continuation 1 has no context"):
        score_continuations(backbone, [Continuation([1], [1]), Continuation([], [1])])
    with pytest.raises(ValueError, match="id 60 is beyond the embedding of 60"):
        score_continuations(backbone, [Continuation([60], [1])])
    assert score_continuations(backbone, []) == []
