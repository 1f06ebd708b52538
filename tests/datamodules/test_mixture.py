import json
from typing import Any

import pytest
import torch

from datamodules import MixtureDataModule, TextDataModule
from datamodules.packing.positions import PoSE
from tests.support.trainers import seen_trainer

TEXT = "datamodules.TextDataModule"


@pytest.fixture
def corpora(tmp_path):
    """Two corpora of which every document fills a row of 4 with its end: 12 documents of ``a``, 8 of ``b``."""
    for name, count in (("a", 12), ("b", 8)):
        lines = [json.dumps({"text": f"{name} {name} {name}"}) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        (tmp_path / f"{name}_val.jsonl").write_text(json.dumps({"text": f"{name} c d"}))
    return tmp_path


def sources(folder, **weights):
    return {
        name: {
            "class_path": TEXT,
            "init_args": {"train": f"{folder}/{name}.jsonl", "validation": f"{folder}/{name}_val.jsonl"},
            "weight": weights.get(name, 1.0),
        }
        for name in ("a", "b")
    }


def mixture(folder, tokenizer, changed=None, stage="fit", rank=0, world_size=1, max_steps=-1, **options):
    settings = {"sequence_length": 4, "cache_dir": str(folder / "cache"), **options}
    module = MixtureDataModule(tokenizer, sources=changed or sources(folder, a=3), **settings)
    module.trainer = seen_trainer(stage, rank, world_size, max_steps=max_steps, accumulate_grad_batches=2)
    return module


def ready(*args, stage="fit", **kwargs):
    module = mixture(*args, stage=stage, **kwargs)
    module.prepare_data()
    module.setup(stage)
    return module


def first_tokens(loader):
    return [token for batch in loader for token in batch["input_ids"][:, 0].tolist()]


def test_rows_come_by_weight(corpora, word_tokenizer, caplog):
    caplog.set_level("INFO")
    loader = ready(corpora, word_tokenizer, max_steps=8, batch_size=2).train_dataloader()
    tokens = first_tokens(loader)  # a is 1, b is 2
    assert len(loader) == 8
    assert (tokens.count(1), tokens.count(2)) == (12, 4)
    assert all(tokens[start : start + 4].count(2) == 1 for start in range(0, 16, 4))
    assert "a: each epoch of 16 sequences has 12 of its 12 sequences." in caplog.text
    assert "b: each epoch of 16 sequences has 4 of its 8 sequences." in caplog.text


def test_processes_and_workers_share_the_same_order(corpora, word_tokenizer):
    whole = first_tokens(ready(corpora, word_tokenizer).train_dataloader())
    parts = [
        first_tokens(ready(corpora, word_tokenizer, rank=rank, world_size=2, num_workers=1).train_dataloader())
        for rank in range(2)
    ]
    assert [token for pair in zip(*parts, strict=True) for token in pair] == whole


def test_resumes_in_the_middle_of_an_epoch_but_not_with_other_weights(corpora, word_tokenizer, caplog):
    loader = ready(corpora, word_tokenizer).train_dataloader()
    rows = list(loader)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    resumed = ready(corpora, word_tokenizer).train_dataloader()
    resumed.load_state_dict(state)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(resumed, rows[5:], strict=True))
    other = ready(corpora, word_tokenizer, sources(corpora, a=1)).train_dataloader()
    other.load_state_dict(state)
    assert "'counts': ([12, 4], [8, 8])" in caplog.text
    assert len(list(other)) == 16


def test_positions_skip_differently_in_each_source_and_with_each_seed(corpora, word_tokenizer):
    skips = set()
    for seed in range(2):
        module = ready(corpora, word_tokenizer, seed=seed, pose=PoSE(10**6))
        for rows in module.mixed_rows.values():
            skips.add(int(rows[0]["position_ids"].max()))
    assert len(skips) == 4


def test_a_source_with_too_few_documents_for_the_steps_is_warned_of(corpora, word_tokenizer):
    module = ready(corpora, word_tokenizer, train_documents=4, max_steps=4)
    with pytest.warns(
        UserWarning, match=r"Source 'a' .* `train_documents` = 4 gives 4 seq.* the steps read 6"
    ) as found:
        module.train_dataloader()
    assert not any("Source 'b'" in str(each.message) for each in found), "it has 4 sequences and needs 2"


def test_evaluation_documents_of_all_or_of_some(corpora, word_tokenizer):
    def names(**options):
        module = ready(corpora, word_tokenizer, stage="validate", **options)
        return [batch["text"][0] for batch in module.val_dataloader()]

    assert names() == ["a c d", "b c d"]
    assert names(evaluate_on=["b"]) == ["b c d"]
    changed = sources(corpora)
    del changed["a"]["init_args"]["validation"]
    assert names(changed=changed, evaluate_on=["b"]) == ["b c d"]
    with pytest.raises(ValueError, match="Source 'a'"):
        names(changed=changed)
    assert not (corpora / "cache").exists(), "validation tokenises nothing"


def test_all_documents_of_each_source_are_evaluated_with_null(corpora, word_tokenizer):
    for name in ("a", "b"):
        (corpora / f"{name}_val.jsonl").write_text((json.dumps({"text": f"{name} c d"}) + "\n") * 60)
    lengths = [len(ready(corpora, word_tokenizer, stage="validate").validation)]
    lengths.append(len(ready(corpora, word_tokenizer, stage="validate", validation_documents=None).validation))
    assert lengths == [100, 120]


def test_a_source_has_the_settings_of_the_mixture_and_some_of_its_own(corpora, word_tokenizer):
    changed = sources(corpora)
    changed["b"]["init_args"]["long_documents"] = {"longer_than": 2, "weight": 2}
    module = mixture(corpora, word_tokenizer, changed, isolate_documents=False, add_special_tokens=True)
    assert all(each.sequence_length == 4 and not each.isolate_documents for each in module.modules.values())
    assert all(each.add_special_tokens and each.cache_dir == corpora / "cache" for each in module.modules.values())
    assert [each.long_documents is None for each in module.modules.values()] == [True, False]


class FewDocuments(TextDataModule):
    def __init__(self, tokenizer: str, *, train_documents: int = 5, **kwargs: Any) -> None:
        super().__init__(tokenizer, train_documents=train_documents, **kwargs)


def test_a_class_of_the_user_keeps_its_defaults_of_what_the_mixture_does_not_set(corpora, word_tokenizer):
    def documents(**options):
        own = changed(corpora, class_path=f"{__name__}.FewDocuments")
        module = mixture(corpora, word_tokenizer, own, **options).modules["a"]
        return module.train_documents, module.validation_documents

    # The command line passes all options, also those that nobody has set.
    assert documents(train_documents=None, validation_documents=None) == (5, None)
    assert documents(train_documents=3) == (3, 50)


def changed(folder, **values):
    each = sources(folder)
    for name, value in values.items():
        target = each["a"] if name in ("class_path", "weight") else each["a"]["init_args"]
        target[name] = value
    return each


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"sequence_length": 8}, "'sequence_length'"),
        ({"pose": {"target_length": 8}}, "'pose'"),
        ({"tokenizer": "other"}, "'tokenizer'"),
        ({"batch_size": 8}, "'batch_size'"),
        ({"class_path": "datamodules.Nothing"}, "Nothing"),
    ],
)
def test_bad_sources_are_named(corpora, word_tokenizer, values, named):
    with pytest.raises(ValueError, match=f"(?is)source 'a'.*{named}|{named}.*source 'a'"):
        mixture(corpora, word_tokenizer, changed(corpora, **values))


@pytest.mark.parametrize(
    ("options", "act", "named"),
    [
        ({"influence": "folder"}, None, "`influence`"),
        ({"evaluate_on": ["c"]}, None, "`evaluate_on`"),
        ({"train": None, "evaluate_on": ["b"]}, lambda module: module.prepare_data(), "Source 'a'"),
        ({"tokenizer_of_b": True}, lambda module: module.prepare_data(), "Source 'b'"),
        ({}, lambda module: module.training_rows(), "one source at a time"),
    ],
)
def test_what_makes_no_sense_is_refused(corpora, word_tokenizer, byte_tokenizer, options, act, named):
    def refused(tokenizer_of_b=False, train="", **options):
        sources = changed(corpora) if train == "" else changed(corpora, train=train)
        module = mixture(corpora, word_tokenizer, sources, **options)
        if tokenizer_of_b:
            module.modules["b"].tokenizer_name = byte_tokenizer
        act(module)

    with pytest.raises(ValueError, match=named):
        refused(**options)
