import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.models.backbone import Backbone
from lightning_modules.tasks.evaluation.questions import make_questions, question_keys
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from tests.support.toy_tasks import GUESS, SEVERAL


@pytest.fixture(scope="session")
def prompter(tokenizer):
    return Prompter(tokenizer)


@pytest.fixture(scope="session")
def guessing_dir(model_dir, prompter, tmp_path_factory):
    """A model that has learnt that one of two words follows, and cannot know which."""
    torch.manual_seed(0)
    tasks = find_tasks([GUESS, SEVERAL])
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    examples = [question.example for question in make_questions(question_keys(tasks, [48], 8), tasks, prompter, 7)]
    for step in range(40):
        example = examples[step % len(examples)]
        forced = prompter.force(example.prompt, example.answer_prefix, example.target, example.answers)
        ids = torch.tensor([[*forced.input_ids, prompter.tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : forced.answer_start] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("guessing")
    model.save_pretrained(folder)
    prompter.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def guessing(guessing_dir):
    model = AutoModelForCausalLM.from_pretrained(guessing_dir, attn_implementation="sdpa")
    return Backbone(model.eval())
