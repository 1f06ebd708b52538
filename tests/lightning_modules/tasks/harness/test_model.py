"""Our class against the one that it derives from, and against plain logits."""

import copy
import random

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.generation import generate
from lightning_modules.tasks.harness.evaluation import evaluate_tasks
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.results import merge_results
from lightning_modules.tasks.harness.tasks import find_names, load_tasks
from tests.conftest import tiny_model

NAMES = ["both", "answer", "rolling"]


@pytest.fixture(scope="module", params=["float32", "long texts"])
def pair(request, model_dir):
    """Ours and theirs, which read few tokens at a time if texts shall be long: rolling windows, left truncation."""
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.add_special_tokens({"pad_token": "</s>"})
    length = 4096 if request.param == "float32" else 64
    # Not rounded: of the same argument each of both would else have another token now and then.
    model = tiny_model("llama", len(tokenizer), seed=1).double()
    config = TaskConfig(max_length=length, truncation="left", limit=5)
    ours = HarnessModel(Backbone(model), tokenizer, config)
    return ours, HFLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1)


@pytest.mark.slow
def test_answers_and_metrics_match_the_harness(pair, task_dir):
    ours, theirs = pair
    manager, names = find_names(NAMES, str(task_dir))
    found = merge_results([evaluate_tasks(ours, load_tasks(manager, name, ours.task_config)) for name in names])
    manager = TaskManager(include_path=str(task_dir), include_defaults=False)
    settings = {"task_manager": manager, "bootstrap_iters": 0, "limit": 5}
    expected = simple_evaluate(theirs, tasks=NAMES, **settings)
    # By default, they put the first token before a whole text twice, and score it.
    theirs.add_bos_token = False
    for part, of_task in simple_evaluate(theirs, tasks=["rolling"], **settings).items():
        if part in ("results", "samples"):
            expected[part] |= of_task
    assert set(found["samples"]) == {"choice", "letter", "answer", "rolling"}
    for name, samples in found["samples"].items():
        assert found["n-samples"][name]["effective"] == 5
        for one, other in zip(samples, expected["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            for mine, their in zip(one["resps"], other["resps"], strict=True):
                if isinstance(their[0], tuple):
                    assert mine[0][0] == pytest.approx(their[0][0], abs=1e-4)
                    assert mine[0][1] == their[0][1]
                else:
                    assert mine == (their if isinstance(their[0], str) else pytest.approx(their, abs=1e-3))
        numbers = {key: value for key, value in found["results"][name].items() if isinstance(value, float)}
        assert numbers == pytest.approx({key: expected["results"][name][key] for key in numbers}, rel=1e-6)
    assert any(answer for sample in found["samples"]["answer"] for answer in sample["resps"][0])
    assert found["groups"]["both"]["acc,none"] == pytest.approx(expected["groups"]["both"]["acc,none"])


@pytest.mark.parametrize("excess", [1, 2])
def test_a_continuation_that_does_not_fit_is_refused(tokenizer, excess):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, TaskConfig(max_length=20))
    with pytest.raises(ValueError, match=rf"continuation of {20 + excess} tokens.*= 20"):
        model._loglikelihood_tokens([(("", ""), [5] * 30, [6] * (20 + excess))])
    assert len(model._loglikelihood_tokens([(("", ""), [5] * 30, [6] * 20)])) == 1


def test_long_prompts_lose_their_middle(tokenizer, monkeypatch):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, TaskConfig(max_length=20))
    read = []
    monkeypatch.setattr(
        "lightning_modules.tasks.harness.model.generate", lambda _, prompts, *__, **___: [read.extend(prompts)] and [[]]
    )
    text = "".join(f"{number} ba " for number in range(30))
    ids = model.tok_encode(text)

    def answer(prompt, tokens):
        model.generate_until([Instance("generate_until", {}, (prompt, {"max_gen_toks": tokens, "until": []}), 0)])

    short = model.tok_encode("ba ce")
    for tokens in (4, 20 - len(short)):
        answer("ba ce", tokens)
        assert (read.pop(), model.truncated) == (short, 0)
    answer(text, 5)
    assert (read.pop(), model.truncated) == (ids[:7] + ids[-8:], 1)
    shortened = ids[:9] + ids[-9:]  # the last token of the continuation is predicted, not read
    scores = model._loglikelihood_tokens([(("", ""), ids, [5, 6, 7]), (("", ""), shortened, [5, 6, 7])])
    assert scores[0] == scores[1]
    assert model.truncated == 2
    with pytest.raises(ValueError, match="max_length"):
        answer(text, 20)


def test_truncated_prompts_of_all_processes_are_counted(tokenizer, monkeypatch):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, TaskConfig(max_length=20))
    monkeypatch.setattr("lightning_modules.tasks.harness.model.rank_and_size", lambda: (0, 2))
    # The other process answers the second request, and has truncated its prompt.
    monkeypatch.setattr(
        "lightning_modules.tasks.harness.model.gathered", lambda own: [own, (own[0], [(-1.0, False)], 1)]
    )
    requests = [Instance("loglikelihood", {}, (context, " ce"), 0) for context in ("ba", "ba ce " * 30)]
    assert model.loglikelihood(requests)[1] == (-1.0, False)
    assert model.truncated == 1


def test_each_text_has_the_sum_of_its_windows(tokenizer):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, TaskConfig(max_length=20))
    requests = [Instance("loglikelihood_rolling", {}, ("ba ce di " * count,), 0) for count in (1, 20, 5)]
    together = model.loglikelihood_rolling(requests)
    assert together == pytest.approx([model.loglikelihood_rolling([request])[0] for request in requests])
    assert together[1] < together[2] < together[0] < 0


def test_generation_stops_at_a_sequence_across_tokens(tokenizer):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer), seed=1)), tokenizer, TaskConfig())
    whole = Instance("generate_until", {}, ("ba ce di", {"max_gen_toks": 40, "until": []}), 0)
    (text,) = model.generate_until([whole])
    stop = text[10:14]
    passes = []
    model.backbone.decoder.register_forward_hook(lambda *_: passes.append(1))
    stopping = Instance("generate_until", {}, ("ba ce di", {"max_gen_toks": 40, "until": [stop, "###"]}), 0)
    assert model.generate_until([stopping]) == [text.partition(stop)[0]]
    assert len(passes) < 30


def test_samples_differ_between_repeats_and_repeat_for_a_seed(tokenizer):
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, TaskConfig())

    def sample(**arguments):
        given = {"do_sample": True, "max_gen_toks": 8, **arguments}
        return model.generate_until([Instance("generate_until", {}, ("ba", given), 0)] * 3)

    texts = sample()
    assert len(set(texts)) == 3
    assert sample() == texts
    assert set(sample(seed=1)).isdisjoint(texts)
    assert len(set(sample(top_k=1))) == 1
    assert sample(top_k=1) == sample(do_sample=False)


def test_random_states_and_modes_are_restored(tokenizer, task_dir):
    network = tiny_model("llama", len(tokenizer)).train()
    network.model.layers[0].mlp.eval()
    modes = [module.training for module in network.modules()]
    model = HarnessModel(Backbone(network), tokenizer, TaskConfig())
    before = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())
    loaded = load_tasks(find_names(["choice"], str(task_dir))[0], "choice", TaskConfig())
    first = evaluate_tasks(model, loaded)["samples"]["choice"]
    assert random.getstate() == before[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    torch.testing.assert_close(torch.get_rng_state(), before[2])
    assert [module.training for module in network.modules()] == modes
    again = evaluate_tasks(model, loaded)["samples"]["choice"]
    assert [sample["arguments"] for sample in again] == [sample["arguments"] for sample in first]


def reference(model, context, tokens):
    """One token at a time."""
    ids, total, greedy = list(context), 0.0, True
    for token in tokens:
        logits = model(torch.tensor([ids])).logits[0, -1].detach()
        total += float(logits.log_softmax(0)[token])
        greedy &= int(logits.argmax()) == token
        ids.append(token)
    return total, greedy


@pytest.fixture(scope="module")
def network(tokenizer):
    return tiny_model("llama", len(tokenizer), seed=3).double()


def questions(network):
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(60, (count,), generator=generator).tolist()

    shared = draw(9)
    asked = [(draw(length), draw(count)) for length, count in [(1, 1), (40, 3), (5, 12), (17, 1), (2, 0)]]
    asked += [(shared, [token]) for token in range(6)]  # the choices of a question
    asked += [(shared[:7], [*shared[7:], 4])]  # the same text, of which more is asked
    context = draw(11)
    asked.append((context, generate(Backbone(network), [context], 4)[0]))
    return asked


@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_matches_one_token_at_a_time(network, tokenizer, batch_tokens, monkeypatch):
    monkeypatch.setattr("lightning_modules.models.backbone.TOKENS_PER_PASS_CPU", batch_tokens)
    asked, passes = questions(network), []
    hook = network.get_decoder().register_forward_hook(lambda _, __, output: passes.append(output[0].shape))
    found = HarnessModel(Backbone(network), tokenizer, TaskConfig())._loglikelihood_tokens(
        [(("", ""), context, tokens) for context, tokens in asked]
    )
    hook.remove()
    for (log_likelihood, is_greedy), question in zip(found, asked, strict=True):
        total, greedy = reference(network, *question)
        assert log_likelihood == pytest.approx(total, abs=1e-9)
        assert is_greedy == greedy
    assert found[-1][1]
    assert sum(is_greedy for _, is_greedy in found) < len(found)
    assert all(rows * length <= max(batch_tokens, 42) for rows, length, _ in passes)
    assert sum(rows for rows, _, _ in passes) == 7  # the seven about one text share a row


def test_dropout_is_off_and_unknown_tokens_are_refused(tokenizer):
    backbone = Backbone(tiny_model("llama", 60, attention_dropout=0.5).train())
    model = HarnessModel(backbone, tokenizer, TaskConfig())
    asked = [(("", ""), [1, 2, 3], [4])]
    assert model._loglikelihood_tokens(asked) == model._loglikelihood_tokens(asked)
    assert model._loglikelihood_tokens([]) == []
    with pytest.raises(ValueError, match="60"):
        model._loglikelihood_tokens([(("", ""), [60], [1])])


def test_a_tokenizer_without_bos_and_eos_is_refused(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), bare, TaskConfig())
    assert tokenizer.pad_token is None, "a class of the harness sets it on its own copy"


def test_chat_template(model_dir, task_dir):
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    config = TaskConfig(chat_template=True, limit=1)
    model = HarnessModel(Backbone(tiny_model("llama", len(tokenizer))), tokenizer, config)
    loaded = load_tasks(find_names(["letter"], str(task_dir))[0], "letter", config)
    prompt = evaluate_tasks(model, loaded)["samples"]["letter"][0]["arguments"][0][0]
    assert prompt.startswith("<s>")
    assert model.tok_encode(prompt).count(tokenizer.bos_token_id) == 1  # none besides the template's
