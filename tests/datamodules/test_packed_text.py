import json
import logging
import os
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jsonargparse
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import LightningDataModule

import datamodules
from datamodules import PackedTextDataModule, TextDataModule
from datamodules.influence.writer import InfluenceWriter
from datamodules.packing.packing import pack_documents
from datamodules.packing.samplers import RowSampler
from datamodules.packing.sequences import PackedRowDataset
from datamodules.sources.documents import Document, text_folder
from datamodules.token_store.store import build_token_store
from lightning_modules.batch import IGNORE_INDEX, batch_to
from lightning_modules.models.tokenization.tokenizer import load_tokenizer


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
    module.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank},
        state=SimpleNamespace(fn=stage),
    )
    module.prepare_data()
    module.setup(stage)
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
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


def stored(tokenizer, root, **kwargs):
    """Weights of the rows of `root`: a tenth of the token's place in the stream."""
    module = ready(tokenizer, root, **kwargs)
    writer = InfluenceWriter(root / "w", {**module.rows.identity(), "gamma": 5.0}, module.rows.rows, tokens=11)
    writer.write(range(3), np.arange(9, dtype=np.float32).reshape(3, 3) / 10)
    writer.finish()
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


def test_weights_of_other_rows_are_refused(word_tokenizer, root, monkeypatch):
    folder = stored(word_tokenizer, root)
    with monkeypatch.context() as patch:
        patch.setattr(Folders, "_token_store", None)  # found before anything is tokenised
        with pytest.raises(ValueError, match="`sequence_length` = 3, not 2"):
            ready(word_tokenizer, root, sequence_length=2, influence=folder)
    with pytest.raises(ValueError, match="`isolate_documents` = True, not False"):
        ready(word_tokenizer, root, isolate_documents=False, influence=folder)
    with pytest.raises(ValueError, match="differently packed sequences"):
        ready(word_tokenizer, root, packing="best_fit", influence=folder)
    (root / "train" / "0.txt").write_text("a b c d e f g")
    with pytest.raises(ValueError, match="other training text"):
        ready(word_tokenizer, root, influence=folder)
    with pytest.raises(ValueError, match="no token weights in"):
        ready(word_tokenizer, root, influence=str(root / "none"))
    assert len(ready(word_tokenizer, root, "validate", influence=str(root / "none")).val_dataloader()) == 3


def test_validation_documents_are_cut_and_named(word_tokenizer, root):
    module = ready(word_tokenizer, root, validation_batch_size=2, validation_length=2)
    first, second = module.val_dataloader()
    assert first["input_ids"].tolist() == [[1, 2], [5, 0]]  # no end-of-text token: the second row is padded
    assert first["document_boundaries"] == [[0, 2], [0, 1]]
    assert (first["text"], first["names"]) == (["a b", "e"], ["0", "1"])
    assert second["text"] == ["f g"]


@pytest.mark.parametrize(("length", "text"), [(None, "a b c"), ("whole", "a b c d"), (1, "a")])
def test_validation_length(word_tokenizer, root, length, text):
    module = ready(word_tokenizer, root, validation_length=length, validation_documents=1)
    assert [batch["text"] for batch in module.val_dataloader()] == [[text]]


def test_number_of_documents(word_tokenizer, root):
    module = ready(word_tokenizer, root, "validate", validation_documents=2)
    assert len(module.val_dataloader()) == 2
    assert len(ready(word_tokenizer, root, validation_documents=None).val_dataloader()) == 3


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_test_split_needs_no_training_text(word_tokenizer, root, stage):
    (root / "train" / "0.txt").write_bytes(b"\xff")
    module = ready(word_tokenizer, root, stage)
    loader = module.test_dataloader() if stage == "test" else module.predict_dataloader()
    assert [batch["text"] for batch in loader] == [["h"]]
    assert not (root / "cache").exists()


def test_processes_that_share_a_row_read_the_same_and_have_documents_of_their_own(word_tokenizer, root):
    modules = [ready(word_tokenizer, root, rank=rank, world_size=2) for rank in range(2)]
    for module in modules:
        module.trainer.distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}
    rows = [[batch["input_ids"].tolist() for batch in module.train_dataloader()] for module in modules]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
    documents = [[batch["names"][0] for batch in module.val_dataloader()] for module in modules]
    assert documents == [["0", "2"], ["1", ""]]


def test_two_processes_share_the_rows_and_documents(word_tokenizer, root):
    modules = [ready(word_tokenizer, root, rank=rank, world_size=2, sequence_length=2) for rank in range(2)]
    rows = [[tuple(batch["input_ids"][0].tolist()) for batch in module.train_dataloader()] for module in modules]
    assert [len(each) for each in rows] == [2, 2]
    assert len(set(rows[0]) | set(rows[1])) == 4
    documents = [[batch["names"][0] for batch in module.val_dataloader()] for module in modules]
    assert documents == [["0", "2"], ["1", ""]]
    empty = list(modules[1].val_dataloader())[1]
    assert (empty["labels"] == IGNORE_INDEX).all()


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
    plain, workers = (ready(word_tokenizer, root, num_workers=count) for count in (0, 2))
    for loader in ("train_dataloader", "val_dataloader"):
        pairs = zip(getattr(plain, loader)(), getattr(workers, loader)(), strict=True)
        assert all(torch.equal(one["labels"], other["labels"]) for one, other in pairs)


def test_spawned_workers_can_have_the_rows(word_tokenizer, root):
    module = ready(word_tokenizer, root)
    for dataset in (module.rows, module.validation):
        copy = pickle.loads(pickle.dumps(dataset))
        assert len(copy) == len(dataset)
        assert torch.equal(copy[1]["labels"], dataset[1]["labels"])


@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"])
def test_loaders_ask_for_setup(word_tokenizer, root, loader):
    with pytest.raises((RuntimeError, ValueError), match=r"`setup\('\w+'\)`"):
        getattr(Folders(word_tokenizer, root), loader)()


def test_missing_validation_split_is_found_before_tokenising(word_tokenizer, root):
    for file in (root / "validation").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="validation"):
        ready(word_tokenizer, root)
    assert not (root / "cache").exists()


def test_second_run_tokenises_nothing(word_tokenizer, root, caplog):
    caplog.set_level(logging.INFO)
    ready(word_tokenizer, root)
    ready(word_tokenizer, root)
    assert caplog.text.count("Tokenized 3 documents into 11 tokens") == 1


# a b c d <eos> | e f g <eos> | h <eos>
PACKED = {
    "concat": [[1, 2, 3, 4], [0, 5, 6, 7]],
    "best_fit": [[1, 2, 3, 4], [0, 8, 0], [5, 6, 7, 0]],
    "chunk": [[1, 2, 3, 4], [5, 6, 7, 0]],
}


@pytest.mark.parametrize("packing", PACKED)
def test_packings(word_tokenizer, root, packing, caplog):
    logging.getLogger("lightning.pytorch").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "lightning.pytorch")
    module = ready(word_tokenizer, root, sequence_length=4, packing=packing)
    logging.getLogger("lightning.pytorch").removeHandler(caplog.handler)
    batches = list(module.train_dataloader())
    found = sorted(b["input_ids"][0, : b["document_boundaries"][0][-1]].tolist() for b in batches)
    assert found == sorted(PACKED[packing])
    assert {batch["input_ids"].shape for batch in batches} == {(1, 4)}
    assert f"Packed 3 documents ({packing}) into {module.rows.rows}." in caplog.text


ODD = st.lists(
    st.one_of(
        st.sampled_from(["", "a", "🙂", "日本語", "\x00", " \n", "naïve café " * 9, "the cat sat on the mat " * 20]),
        st.text(max_size=30),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(texts=ODD.filter(lambda texts: any(map(str.strip, texts))), length=st.sampled_from([1, 7, 32]), data=st.data())
@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_reads_every_token_of_odd_documents_once(byte_tokenizer, packing, world_size, texts, length, data):
    tokenizer = load_tokenizer(byte_tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        store = build_token_store(InMemory(texts), tokenizer, cache_dir=Path(folder))
        try:
            rows = pack_documents(store.document_boundaries, length, packing)
        except ValueError:  # too little text for a row
            rows = None
        texts = [text for text in texts if text.strip()]  # the others are left out
        expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
        assert store.tokens.tolist() == expected
        if rows is None or len(rows) < world_size:
            return
        dataset, seen, left_out = PackedRowDataset(store, rows), np.zeros(len(expected), int), set(range(len(rows)))
        epoch = data.draw(st.integers(0, 3))
        for rank in range(world_size):
            sampler = RowSampler(len(rows), rank=rank, world_size=world_size)
            sampler.set_epoch(epoch)
            for number in sampler:
                places = [place for start, stop in rows.row(number) for place in range(start, stop)]
                row = dataset[number]
                assert row["input_ids"].tolist() == [expected[p] for p in places] + [0] * (length - len(places))
                assert row["document_boundaries"][-1] == len(places)
                seen[places] += 1
                left_out.remove(number)
    assert seen.max() == 1
    assert len(left_out) < world_size
    not_in_this_epoch = sum(stop - start for number in left_out for start, stop in rows.row(number).tolist())
    assert (seen == 0).sum() == rows.dropped_tokens + not_in_this_epoch


class InMemory:
    """Documents as they are, also empty ones, which the readers of files refuse."""

    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return (Document(str(number), text) for number, text in enumerate(self.texts))

    def fingerprint(self):
        return ""


def prompted(tokenizer, root, **kwargs):
    records = [{"prompt": "a b ", "text": "c d"}, {"prompt": "e f g h", "text": " a"}, {"prompt": "", "text": "b c"}]
    if not (root / "x.jsonl").exists():
        (root / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"prompt_field": "prompt", "sequence_length": 3, "cache_dir": str(root / "cache"), **kwargs}
    path = str(root / "x.jsonl")
    module = TextDataModule(tokenizer, train=path, validation=path, **settings)
    module.setup("fit")
    return module


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


def test_prompts_that_nobody_has_named_are_no_reason_to_guess(word_tokenizer, root):
    with pytest.raises(ValueError, match="`loss_on_prompt: false` needs prompts, but no training document"):
        ready(word_tokenizer, root, loss_on_prompt=False)
    with pytest.raises(ValueError, match="set `prompt_field` to their field"):
        TextDataModule(word_tokenizer, train="x", loss_on_prompt=False)
    for path in (str(root / "train" / "0.txt"), "owner/name"):
        with pytest.raises(ValueError, match="`prompt_field` needs JSON lines"):
            TextDataModule(word_tokenizer, train=path, prompt_field="p").source("train")


@pytest.mark.parametrize("name", ["PG19DataModule", "PileArxivDataModule", "GovReportDataModule"])
def test_yaml(name):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")

    def parse(**init_args):
        config = {"data": {"class_path": f"datamodules.{name}", "init_args": {"tokenizer": "owner/model", **init_args}}}
        return parser.instantiate(parser.parse_string(yaml.safe_dump(config))).data

    module = parse(path="here", sequence_length=8192, validation_length="whole", validation_documents=None)
    assert isinstance(module, getattr(datamodules, name))
    assert (module.path, module.sequence_length, module.validation_length) == ("here", 8192, "whole")
    for wrong in ({"sequence_length": 0}, {"validation_length": "half"}, {"seed": -1}, {"sequence_lenght": 8}):
        with pytest.raises(jsonargparse.ArgumentError):
            parse(**wrong)


def test_rows_packed_otherwise_have_another_checksum(word_tokenizer, root):
    packed = [ready(word_tokenizer, root, packing=packing) for packing in ("concat", "best_fit", "concat")]
    first, other, again = [module.rows.checksum() for module in packed]
    assert first == again != other


def test_labels_may_be_edited_until_a_batch_is_moved(word_tokenizer, root):
    batch = next(iter(ready(word_tokenizer, root).train_dataloader()))
    assert batch["scored"].any()
    batch["labels"].fill_(IGNORE_INDEX)
    moved = ready(word_tokenizer, root).transfer_batch_to_device(batch, torch.device("cpu"), 0)
    assert not moved["scored"].any()
