"""Answers to the harness for tokenizers that add special tokens in different places, against plain logits."""

import json

import pytest
import torch

from longce.evaluate import evaluate
from tests.support.reference import document_log_likelihood
from tests.support.special_tokens import STARTS, load_reference, plain_ids, write_models


@pytest.fixture(scope="module")
def folders(model_dir, tokenizer, tmp_path_factory):
    return write_models(model_dir, tokenizer, tmp_path_factory.mktemp("models"))


def read_samples(folder, task):
    """Yield the arguments of each request of a task, and the model's answer."""
    (file,) = folder.glob(f"samples_{task}_*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        for arguments, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
            yield list(arguments.values()), answer


def log_likelihood(model, context, tokens):
    return float(document_log_likelihood(model, torch.tensor([*context, *tokens]))[len(context) :].sum())


def continue_greedily(model, ids, limit):
    new = []
    for _ in range(limit):
        new.append(int(model(torch.tensor([ids + new]), use_cache=False).logits[0, -1].argmax()))
    return new


@pytest.mark.slow
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("name", list(STARTS))
def test_answers_are_those_of_plain_logits(name, added, folders, task_dir, tmp_path):
    options = {"include_path": str(task_dir), "limit": 2, "log_samples": True, "add_special_tokens": added}
    evaluate(str(folders / name), str(tmp_path), tasks=["choice", "answer", "rolling"], **options)
    model, tokenizer = load_reference(folders / name)
    start = STARTS[name] if added else []
    for (context, continuation), ((found, _),) in read_samples(tmp_path, "choice"):
        prompt = plain_ids(tokenizer, context)
        choice = plain_ids(tokenizer, context + continuation)[len(prompt) :]
        assert float(found) == pytest.approx(log_likelihood(model, start + prompt, choice), rel=1e-5)
    for (text,), (found,) in read_samples(tmp_path, "rolling"):
        # The first special token once, as context, whatever the tokenizer adds.
        assert float(found) == pytest.approx(log_likelihood(model, [0], plain_ids(tokenizer, text)), rel=1e-5)
    for (prompt, settings), (found,) in read_samples(tmp_path, "answer"):
        new = continue_greedily(model, start + plain_ids(tokenizer, prompt), settings["max_gen_toks"])
        answer = tokenizer.decode(new, skip_special_tokens=True)
        for stop in settings["until"]:
            answer = answer.partition(stop)[0]
        assert found == answer
