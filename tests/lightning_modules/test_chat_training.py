"""LongCE on chats: the loss and the weights of a run against a float64 formula, and a run that is interrupted."""

import json
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from datamodules import TextDataModule
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from tests.conftest import tiny_model
from tests.support import reference
from tests.support.tiny_training import lm, trainer

K, D, GAMMA, LENGTH = 6, 3, 5.0, 40
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path, model_dir, corpus):
    """A model with a chat template, and chats of two turns in which only what the assistant writes is learned."""
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model("llama", len(tokenizer), seed=6).save_pretrained(tmp_path / "model")
    lines = []
    for number, text in enumerate(corpus):
        parts = [text[start : start + 60 + number] for start in range(0, 360, 90)]
        roles = ("user", "assistant", "user", "assistant")
        lines.append([{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)])
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in lines))
    return tmp_path


def fit(folder, steps, *callbacks, lr=0.0, **options):
    path = str(folder / "chats.jsonl")
    data = TextDataModule(
        str(folder / "model"),
        train=path,
        validation=path,
        messages_field="messages",
        sequence_length=LENGTH,
        batch_size=2,
        cache_dir=str(folder / "cache"),
    )
    optimizer = partial(torch.optim.AdamW, lr=lr)
    module = lm(str(folder / "model"), context_length=K, stride=D, optimizer=optimizer)
    settings = {"max_steps": steps, "limit_val_batches": 0, "use_distributed_sampler": False}
    run = trainer(folder, callbacks=list(callbacks), **settings)
    run.fit(module, data, **options)
    return module, run


def slow_loss(model, tokenizer, folder, batch):
    """Mean over the assistants' tokens of a batch; which those are, is asked of the template chat by chat."""
    learned = {}  # for each token of the stream, by its place: whether it is learned
    stream = []
    for line in (folder / "chats.jsonl").read_text().splitlines():
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = tokenizer.apply_chat_template(json.loads(line)["messages"], **options)
        for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            learned[len(stream)] = bool(mark)
            stream.append(token)
    total, count = 0.0, 0
    for row, boundaries in zip(batch["input_ids"], batch["document_boundaries"], strict=True):
        starts = range(0, len(stream), LENGTH)
        place = next(start for start in starts if stream[start : start + LENGTH] == row.tolist())
        for start, stop in pairwise(boundaries):
            with torch.no_grad():
                long, short = reference.long_and_short(model, row[start:stop], K, D)
            for t in range(1, stop - start):
                if learned[place + start + t]:
                    weight = min(math.exp(long[t] - short[t]), GAMMA) if t >= K else 1.0
                    total -= weight * long[t].item()
                    count += 1
    return total / count


def test_the_loss_of_a_run_on_chats_is_that_of_a_float64_formula(folder):
    seen = []
    record = LambdaCallback(
        on_train_batch_start=lambda *args: seen.append(args[2]),
        on_train_batch_end=lambda trainer, *_: seen.append(trainer.callback_metrics["train/loss"].item()),
    )
    module, _ = fit(folder, 2, record)
    model = module.backbone.model.double().eval()
    tokenizer = load_tokenizer(str(folder / "model"))
    assert len(seen) == 4
    for batch, loss in (seen[:2], seen[2:]):
        assert loss == pytest.approx(slow_loss(model, tokenizer, folder, batch), rel=1e-5)


def test_a_run_on_chats_that_resumes_ends_with_the_same_weights(folder):
    checkpoint = folder / "half.ckpt"

    def save(trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(checkpoint)

    whole, _ = fit(folder, 4, LambdaCallback(on_train_batch_end=save), lr=1e-2)
    resumed, _ = fit(folder, 4, lr=1e-2, ckpt_path=str(checkpoint))
    start = tiny_model("llama", whole.backbone.vocabulary_size, seed=6).state_dict()
    pairs = zip(whole.backbone.model.state_dict().items(), resumed.backbone.model.state_dict().values(), strict=True)
    for (name, one), other in pairs:
        assert torch.equal(one, other), name
    assert not torch.equal(whole.backbone.model.state_dict()["lm_head.weight"], start["lm_head.weight"])


def test_ids_beyond_the_embedding_are_refused_before_the_first_step(folder):
    (folder / "ids.jsonl").write_text(json.dumps({"ids": [1, 2, 3, 9999, *range(50)]}) + "\n")
    path = str(folder / "ids.jsonl")
    options = {"token_column": "ids", "sequence_length": LENGTH, "cache_dir": str(folder / "cache")}
    data = TextDataModule(train=path, validation=path, **options)
    module = lm(str(folder / "model"), context_length=K, stride=D)
    with pytest.raises(ValueError, match=r"token id 9999.*`data\.token_column`"):
        trainer(folder, limit_val_batches=0, use_distributed_sampler=False).fit(module, data)
