import json
import os
import pickle

import numpy as np
import pytest
import torch

from datamodules import PackedTextDataModule, TextDataModule
from datamodules.influence.writer import InfluenceWriter
from datamodules.sources.documents import text_folder
from lightning_modules.batch import IGNORE_INDEX, batch_to
from tests.support.trainers import seen_trainer


class Folders(PackedTextDataModule):
    """A folder for each split."""

    def __init__(self, tokenizer, root, **kwargs):
        super().__init__(tokenizer, cache_dir=str(root / "cache"), **kwargs)
        self.root = root

    def source(self, split):
        return text_folder(self.root / split)


@pytest.fixture
def root(tmp_path):
    for split, texts in {
        "train": ["a b c d", "e f g", "h"],
        "validation": ["a b c d", "e", "f g"],
        "test": ["h"],
    }.items():
        (tmp_path / split).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / split / f"{number}.txt").write_text(text)
    return tmp_path


def ready(tokenizer, root, stage="fit", rank=0, world_size=1, **kwargs):
    module = Folders(tokenizer, root, **{"sequence_length": 3, **kwargs})
    module.trainer = seen_trainer(stage, rank, world_size)
    module.prepare_data()
    module.setup(stage)
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_documents_are_shared_out_once_in_equal_numbers(word_tokenizer, root, world_size):
    loaders = [ready(word_tokenizer, root, "validate", rank, world_size).val_dataloader() for rank in range(world_size)]
    assert {len(loader) for loader in loaders} == {-(-3 // world_size)}
    names = [batch["names"][0] for loader in loaders for batch in loader]
    assert sorted(filter(None, names)) == ["0", "1", "2"]


def test_training_rows_of_one_epoch(word_tokenizer, root):
    loader = ready(word_tokenizer, root, batch_size=2).train_dataloader()
    batches = list(loader)  # a b c | d <eos> e | f g <eos> | the rest, h <eos>, is dropped
    assert len(loader) == len(batches) == 2
    rows = sorted(zip(*(torch.cat([b[key] for b in batches]).tolist() for key in ("input_ids", "labels")), strict=True))
    assert rows == [
        ([1, 2, 3], [IGNORE_INDEX, 2, 3]),
        ([4, 0, 5], [IGNORE_INDEX, 0, IGNORE_INDEX]),
        ([6, 7, 0], [IGNORE_INDEX, 7, 0]),
    ]


def test_documents_after_the_first_ones_are_neither_read_nor_tokenized(word_tokenizer, root, monkeypatch):
    """Text files and lines of a file; a run of the first documents resumes, and not among others."""
    (root / "train" / "2.txt").write_bytes(b"\xff")  # not UTF-8: reading it would fail
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a b c d", "e f g"))
    (root / "x.jsonl").write_text(lines + "{broken")
    settings = {"sequence_length": 3, "train_documents": 2, "cache_dir": str(root / "lines")}
    (root / "y.jsonl").write_text(lines)
    path, whole = str(root / "x.jsonl"), str(root / "y.jsonl")
    modules = [ready(word_tokenizer, root, train_documents=2), TextDataModule(word_tokenizer, train=path, **settings)]
    modules.append(TextDataModule(word_tokenizer, train=whole, **settings | {"train_documents": None}))
    rows = [module.training_rows() for module in modules]
    assert {each.checksum() for each in rows} == {rows[2].checksum()}
    assert rows[0].store.tokens.tolist() == [1, 2, 3, 4, 0, 5, 6, 7, 0]
    loader = modules[0].train_dataloader()
    taken = [next(iter(loader))["input_ids"].tolist()]
    resumed = ready(word_tokenizer, root, train_documents=2).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    rest = [batch["input_ids"].tolist() for batch in resumed]
    assert sorted(taken + rest) == [[[1, 2, 3]], [[4, 0, 5]], [[6, 7, 0]]]


def test_too_few_documents_for_the_steps_are_warned_of(word_tokenizer, root):
    module = Folders(word_tokenizer, root, sequence_length=3, train_documents=2)
    module.trainer = seen_trainer("fit")
    module.trainer.max_steps, module.trainer.accumulate_grad_batches = 2, 2
    with pytest.warns(UserWarning, match=r"`train_documents` = 2 gives 3 sequences, and the steps read 4, .* Raise"):
        module.setup("fit")


def stored(tokenizer, root, **kwargs):
    """Weights of the rows of `root`: a tenth of the token's place in the stream."""
    module = ready(tokenizer, root, **kwargs)
    writer = InfluenceWriter(root / "w", {**module.rows.identity(), "gamma": 5.0}, module.rows.rows, tokens=11)
    writer.write(range(3), np.arange(9, dtype=np.float32).reshape(3, 3) / 10)
    return str(root / "w")


def test_rows_come_with_their_stored_weights(word_tokenizer, root):
    folder = stored(word_tokenizer, root)
    assert "influence" not in next(iter(ready(word_tokenizer, root).train_dataloader()))
    module = ready(word_tokenizer, root, batch_size=3, influence=folder)
    assert "influence" not in next(iter(module.val_dataloader()))
    (batch,) = module.train_dataloader()
    order = batch["input_ids"][:, 0].argsort()
    assert batch["input_ids"][order].flatten().tolist() == [1, 2, 3, 4, 0, 5, 6, 7, 0]
    torch.testing.assert_close(batch["influence"][order].flatten(), torch.arange(9) / 10, rtol=1e-3, atol=1e-6)
    copy = pickle.loads(pickle.dumps(module.rows))
    assert torch.equal(copy[1]["influence"], module.rows[1]["influence"])
    assert copy[1]["influence"].dtype == torch.float32
    moved = batch_to(batch, torch.device("meta"))
    assert moved["influence"].device.type == "meta"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sequence_length": 2}, "`sequence_length`"),
        ({"isolate_documents": False}, "`isolate_documents`"),
        ({"packing": "best_fit"}, "packed"),
        ({"influence": "none"}, "none"),
        ({}, "text"),
    ],
)
def test_weights_of_other_rows_are_refused(word_tokenizer, root, monkeypatch, options, named):
    folder = stored(word_tokenizer, root)
    if "sequence_length" in options:
        monkeypatch.setattr(Folders, "_token_store", None)  # found before anything is tokenised
    if not options:
        (root / "train" / "0.txt").write_text("a b c d e f g")
    with pytest.raises(ValueError, match=named):
        ready(word_tokenizer, root, **{"influence": folder, **options})
    assert len(ready(word_tokenizer, root, "validate", influence="none").val_dataloader()) == 3


@pytest.mark.parametrize(("length", "text"), [(None, "a b c"), ("whole", "a b c d"), (1, "a")])
@pytest.mark.parametrize("documents", [1, 2, None])
def test_validation_documents_are_cut_and_named(word_tokenizer, root, length, text, documents):
    module = ready(word_tokenizer, root, validation_length=length, validation_documents=documents)
    batches = list(module.val_dataloader())
    assert [batch["names"] for batch in batches] == [["0"], ["1"], ["2"]][:documents]
    assert batches[0]["text"] == [text]


def test_a_batch_of_validation_documents_is_padded(word_tokenizer, root):
    first, second = ready(word_tokenizer, root, validation_batch_size=2, validation_length=2).val_dataloader()
    assert first["input_ids"].tolist() == [[1, 2], [5, 0]]  # no end-of-text token: the second row is padded
    assert first["document_boundaries"] == [[0, 2], [0, 1]]
    assert (first["text"], second["text"]) == (["a b", "e"], ["f g"])


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_test_split_needs_no_training_text(word_tokenizer, root, stage):
    (root / "train" / "0.txt").write_bytes(b"\xff")
    module = ready(word_tokenizer, root, stage)
    loader = module.test_dataloader() if stage == "test" else module.predict_dataloader()
    assert [batch["text"] for batch in loader] == [["h"]]
    assert not (root / "cache").exists()


@pytest.mark.parametrize("readers", [2, 1])
def test_processes_share_documents_and_rows_unless_they_read_the_same(word_tokenizer, root, readers):
    modules = [ready(word_tokenizer, root, rank=rank, world_size=2, sequence_length=2) for rank in range(2)]
    for rank, module in enumerate(modules):
        module.trainer.distributed_sampler_kwargs = {"num_replicas": readers, "rank": rank % readers}
    rows = [[tuple(batch["input_ids"][0].tolist()) for batch in module.train_dataloader()] for module in modules]
    assert [len(each) for each in rows] == [5 // readers] * 2
    assert len(set(rows[0]) | set(rows[1])) == (4 if readers == 2 else 5)
    assert (rows[0] == rows[1]) == (readers == 1)
    documents = [[batch["names"][0] for batch in module.val_dataloader()] for module in modules]
    assert documents == [["0", "2"], ["1", ""]]
    assert (list(modules[1].val_dataloader())[1]["labels"] == IGNORE_INDEX).all()


@pytest.mark.parametrize(("edit", "goes_on"), [("touch", True), ("word", False), ("length", False)])
def test_a_run_goes_on_in_its_epoch_only_over_the_same_rows(word_tokenizer, root, caplog, edit, goes_on):
    loader = ready(word_tokenizer, root).train_dataloader()
    next(iter(loader))
    state = loader.state_dict()
    file = root / "train" / "0.txt"
    os.utime(file, (1, 1))
    if edit == "word":  # as many rows as before
        file.write_text("a b c e")
    if edit == "length":
        file.write_text("a b c")
        (root / "train" / "1.txt").write_text("d e f g")
    resumed = ready(word_tokenizer, root).train_dataloader()
    resumed.load_state_dict(state)
    assert len(resumed) == len(loader) == 3
    assert ("The epoch starts over" in caplog.text) == (not goes_on)
    assert len(list(resumed)) == (2 if goes_on else 3)


def test_workers_read_the_same_rows(word_tokenizer, root):
    plain, workers = (ready(word_tokenizer, root, num_workers=count) for count in (0, 1))
    copy = pickle.loads(pickle.dumps(plain.validation))  # as for a worker that is spawned
    assert torch.equal(copy[1]["labels"], plain.validation[1]["labels"])
    for loader in ("train_dataloader", "val_dataloader"):
        pairs = zip(getattr(plain, loader)(), getattr(workers, loader)(), strict=True)
        assert all(torch.equal(one["labels"], other["labels"]) for one, other in pairs)


# a b c d <eos> | e f g <eos> | h <eos>
PACKED = {
    "concat": [[1, 2, 3, 4], [0, 5, 6, 7]],
    "best_fit": [[1, 2, 3, 4], [0, 8, 0], [5, 6, 7, 0]],
    "chunk": [[1, 2, 3, 4], [5, 6, 7, 0]],
}


@pytest.mark.parametrize("packing", PACKED)
def test_packings(word_tokenizer, root, packing, monkeypatch):
    module = ready(word_tokenizer, root, sequence_length=4, packing=packing)
    batches = list(module.train_dataloader())
    found = sorted(b["input_ids"][0, : b["document_boundaries"][0][-1]].tolist() for b in batches)
    assert found == sorted(PACKED[packing])
    assert {batch["input_ids"].shape for batch in batches} == {(1, 4)}
    monkeypatch.setattr("datamodules.token_store.store._write_store", None)  # the other packings tokenize nothing
    checksums = {ready(word_tokenizer, root, sequence_length=4, packing=each).rows.checksum() for each in PACKED}
    assert len(checksums) == 3
    assert module.rows.checksum() in checksums


def prompted(tokenizer, root, **kwargs):
    records = [{"prompt": "a b ", "text": "c d"}, {"prompt": "e f g h", "text": " a"}, {"prompt": "", "text": "b c"}]
    if not (root / "x.jsonl").exists():
        (root / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"prompt_field": "prompt", "sequence_length": 3, "cache_dir": str(root / "cache"), **kwargs}
    path = str(root / "x.jsonl")
    module = TextDataModule(tokenizer, train=path, validation=path, **settings)
    module.setup("fit")
    return module


def prompts_of(tokenizer, path):
    return TextDataModule(tokenizer, train=path, prompt_field="p").source("train")


def test_the_loss_of_prompts_is_a_choice(word_tokenizer, root):
    no = IGNORE_INDEX
    expected = {
        True: [[no, 2, 3], [no, 0, no], [no, 7, 8], [no, 0, no]],
        False: [[no, no, 3], [no, 0, no], [no, no, no], [no, 0, no]],
    }
    for loss_on_prompt, labels in expected.items():
        module = prompted(word_tokenizer, root, loss_on_prompt=loss_on_prompt)
        assert [module.rows[number]["input_ids"].tolist() for number in range(4)] == [
            [1, 2, 3],
            [4, 0, 5],
            [6, 7, 8],
            [1, 0, 2],
        ]
        assert [module.rows[number]["labels"].tolist() for number in range(4)] == labels
        validation = module.validation[0]["labels"]  # evaluation scores the whole text
        assert validation.tolist() == [no, 2, 3]
    assert len(list((root / "cache").iterdir())) == 1  # one store serves both


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda tokenizer, root: ready(tokenizer, root, loss_on_prompt=False), "`loss_on_prompt: false`"),
        (lambda tokenizer, root: TextDataModule(tokenizer, train="x", loss_on_prompt=False), "`prompt_field`"),
        (lambda tokenizer, root: prompts_of(tokenizer, f"{root}/train/0.txt"), "`prompt_field`"),
    ],
)
def test_prompts_that_nobody_has_named_are_no_reason_to_guess(word_tokenizer, root, refused, named):
    with pytest.raises(ValueError, match=named):
        refused(word_tokenizer, root)


def test_labels_may_be_edited_until_a_batch_is_moved(word_tokenizer, root):
    batch = next(iter(ready(word_tokenizer, root).train_dataloader()))
    batch["labels"][:, ::2] = IGNORE_INDEX
    moved = ready(word_tokenizer, root).transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["scored"].tolist() == batch["labels"].ne(IGNORE_INDEX).tolist()
