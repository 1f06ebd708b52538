import functools
import http.server
import json
import os
import threading

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from datamodules import StreamingTextDataModule
from datamodules.packing.positions import PoSE
from tests.support.trainers import Recorder, quiet_trainer, seen_trainer

LENGTH = 5
LENGTHS = [[3, 9, 1], [20], [2, 2, 2, 2], [7, 6], [11], [4, 30, 1]]
"""Words of each document of each file; every word of the corpus is another one."""


@pytest.fixture
def corpus_folder(tmp_path):
    word = 0
    (tmp_path / "corpus").mkdir()
    for number, lengths in enumerate(LENGTHS):
        lines = []
        for length in lengths:
            lines.append(json.dumps({"text": " ".join(f"w{word + i}" for i in range(length))}))
            word += length
        (tmp_path / "corpus" / f"{number}.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus"


def module(folder, tokenizer, *, rank=0, world_size=1, max_steps=12, **options):
    paths = {"train": str(folder), "validation": f"{folder}/0.jsonl"}
    made = StreamingTextDataModule(tokenizer, **{"sequence_length": LENGTH, **paths, **options})
    steps = {"max_steps": max_steps, "max_epochs": None, "num_training_batches": max_steps}
    made.trainer = seen_trainer("fit", rank, world_size, accumulate_grad_batches=1, **steps)
    made.prepare_data()
    made.setup("fit")
    return made


def rows_of(batches):
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def skipping_rows_of(batches):
    return [row for batch in batches for row in torch.cat([batch["input_ids"], batch["position_ids"]], dim=1).tolist()]


def file_of(word):
    """Number of the file in which a word (its token, less 9) stands."""
    return int(np.searchsorted(np.cumsum([sum(lengths) for lengths in LENGTHS]), word - 9, side="right"))


def test_a_pass_has_every_token_once_in_the_order_of_the_files(corpus_folder, numbered_tokenizer):
    total = sum(map(sum, LENGTHS))
    rows = rows_of(module(corpus_folder, numbered_tokenizer, max_steps=2 * total // LENGTH).train_dataloader())
    tokens = [token for row in rows for token in row]
    for one_pass in (tokens[:total], tokens[total : 2 * total]):
        assert sorted(one_pass) == list(range(9, 9 + total))
        for number, lengths in enumerate(LENGTHS):
            of_file = [token for token in one_pass if file_of(token) == number]
            assert of_file == sorted(of_file)
            assert len(of_file) == sum(lengths)
            start = one_pass.index(of_file[0])
            assert one_pass[start : start + len(of_file)] == of_file
    assert tokens[:total] != tokens[total : 2 * total], "another order of files in the next pass"


def test_rows_end_contexts_at_documents_unless_they_shall_not(corpus_folder, numbered_tokenizer):
    starts = set(np.cumsum([0, *(length for lengths in LENGTHS for length in lengths)]).tolist())
    for batch in module(corpus_folder, numbered_tokenizer, max_steps=20).train_dataloader():
        (tokens,), (boundaries,) = batch["input_ids"].tolist(), batch["document_boundaries"]
        assert boundaries == sorted({0, LENGTH, *(i for i, token in enumerate(tokens) if token - 9 in starts)})
    joined = module(corpus_folder, numbered_tokenizer, isolate_documents=False).train_dataloader()
    assert all(batch["document_boundaries"] == [[0, LENGTH]] for batch in joined)


@pytest.mark.slow
def test_processes_and_workers_read_files_of_their_own(corpus_folder, numbered_tokenizer):
    read = []
    for rank in range(2):
        loader = module(corpus_folder, numbered_tokenizer, rank=rank, world_size=2, num_workers=2).train_dataloader()
        rows = rows_of(loader)
        read += [{file_of(token) for row in rows[worker::2] for token in row} for worker in range(2)]
    assert sum(map(len, read)) == len(set().union(*read)) == len(LENGTHS)


@pytest.mark.parametrize(("num_workers", "after"), [(0, range(12)), pytest.param(2, (1, 4), marks=pytest.mark.slow)])
def test_goes_on_at_the_very_token(corpus_folder, numbered_tokenizer, num_workers, after):
    settings = {"num_workers": num_workers, "batch_size": 2, "pose": PoSE(1000)}
    made = functools.partial(module, corpus_folder, numbered_tokenizer, **settings)
    whole = skipping_rows_of(made().train_dataloader())
    assert len(whole) == 24
    # Positions skip, differently in each row, and nothing else changes.
    assert len({tuple(row[LENGTH:]) for row in whole if max(row[LENGTH:]) >= LENGTH}) > 15
    assert [row[:LENGTH] for row in whole] == rows_of(made(pose=None).train_dataloader())
    for done in after:
        interrupted = made().train_dataloader()
        batches = iter(interrupted)
        first = skipping_rows_of(next(batches) for _ in range(done))
        state = json.loads(json.dumps(interrupted.state_dict()))
        resumed = made().train_dataloader()
        resumed.load_state_dict(state)
        assert first + skipping_rows_of(resumed) == whole
        assert len(resumed) == 12
    with pytest.raises(ValueError, match="pose_target_length"):
        made(pose=None).train_dataloader().load_state_dict(state)


def fitted(folder, tokenizer, steps, save, checkpoint=None):
    recorder = Recorder(lambda batch: batch["input_ids"].tolist()[0])
    settings = {"enable_checkpointing": True, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    trainer = quiet_trainer(folder.parent, save, max_steps=steps, **settings)
    paths = {"train": str(folder), "validation": f"{folder}/0.jsonl"}
    data = StreamingTextDataModule(tokenizer, sequence_length=LENGTH, **paths)
    trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
    assert trainer.global_step == steps
    return recorder.seen


@pytest.mark.slow
def test_each_process_goes_on_with_its_own_streams(corpus_folder, numbered_tokenizer, monkeypatch):
    made = functools.partial(module, corpus_folder, numbered_tokenizer, world_size=2)
    loaders = [made(rank=rank).train_dataloader() for rank in range(2)]
    rows = [rows_of(first_of(loader, 3 + rank)) for rank, loader in enumerate(loaders)]
    own = [[list(cursor) for cursor in loader._cursors] for loader in loaders]
    monkeypatch.setattr("datamodules.packing.streaming.gathered", lambda _: own)
    for rank, loader in enumerate(loaders):
        resumed = made(rank=rank).train_dataloader()
        resumed.load_state_dict({**loaders[0].state_dict(), "batches": loader.state_dict()["batches"]})
        assert rows[rank] + rows_of(resumed) == rows_of(made(rank=rank).train_dataloader())
    monkeypatch.setattr("datamodules.packing.streaming.gathered", lambda _: ["first", "first", "second", "second"])
    assert loaders[0].state_dict()["cursors"] == ["first", "second"], "neighbors that read the same save it once"


def first_of(loader, number):
    """The first batches, and no more are asked for."""
    batches = iter(loader)
    return [next(batches) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_neither_repeats_nor_loses_a_row(corpus_folder, numbered_tokenizer, tmp_path):
    save = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fitted(corpus_folder, numbered_tokenizer, 8, save)
    assert len(whole) == 16
    none = ModelCheckpoint(tmp_path / "none", save_top_k=0)
    for step, steps in ((1, 8), (5, 8), (8, 10)):  # the last one had reached its end
        seen = fitted(corpus_folder, numbered_tokenizer, steps, none, tmp_path / "saved" / f"step={step}.ckpt")
        assert (whole[: 2 * step] + seen)[:16] == whole
        assert len(seen) == 2 * (steps - step)


@pytest.mark.slow
def test_other_streams_are_refused(corpus_folder, numbered_tokenizer, byte_tokenizer):
    state = module(corpus_folder, numbered_tokenizer).train_dataloader().state_dict()
    os.utime(corpus_folder / "3.jsonl", (1, 1))
    module(corpus_folder, numbered_tokenizer).train_dataloader().load_state_dict(state)
    filtered = module(corpus_folder, numbered_tokenizer)
    filtered.where = ("lang", "de")
    others = [filtered, module(corpus_folder, byte_tokenizer)]
    changes = ({"seed": 1}, {"num_workers": 2}, {"sequence_length": 6}, {"train": f"{corpus_folder}/[0-3].jsonl*"})
    others += [module(corpus_folder, numbered_tokenizer, **changed) for changed in changes]
    with (corpus_folder / "3.jsonl").open("a") as file:
        file.write('\n{"text": "w0"}')
    others.append(module(corpus_folder, numbered_tokenizer))
    for other in others:
        with pytest.raises(ValueError, match="checkpoint"):
            other.train_dataloader().load_state_dict(state)


def test_a_stream_is_not_resumed_with_too_few_batches_for_the_steps(corpus_folder, numbered_tokenizer):
    def loader(accumulated):
        data = module(corpus_folder, numbered_tokenizer)
        data.trainer.accumulate_grad_batches = accumulated
        return data.train_dataloader()

    first_of(stopped := loader(2), 10)
    loader(4).load_state_dict(stopped.state_dict())
    with pytest.raises(ValueError, match=r"`trainer.accumulate_grad_batches` = 1, below the 2 of the checkpoint"):
        loader(1).load_state_dict(stopped.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_steps_of_more_batches_than_the_trainer_says_do_not_wait_forever(corpus_folder, numbered_tokenizer):
    recorder = Recorder(lambda batch: batch)
    scheduler = GradientAccumulationScheduler({0: 4})
    trainer = quiet_trainer(corpus_folder.parent, scheduler, max_steps=8, max_epochs=3, limit_val_batches=0)
    paths = {"train": str(corpus_folder), "validation": f"{corpus_folder}/0.jsonl"}
    data = StreamingTextDataModule(numbered_tokenizer, sequence_length=LENGTH, **paths)
    with pytest.raises(ValueError, match=r"ended after the 8 batches .* more are needed"):
        trainer.fit(recorder, datamodule=data)
    assert (trainer.global_step, len(recorder.seen)) == (2, 8)


@pytest.mark.slow
def test_the_file_in_progress_must_be_the_same(corpus_folder, numbered_tokenizer):
    loader = module(corpus_folder, numbered_tokenizer).train_dataloader()
    first_of(loader, 1)
    state = loader.state_dict()
    index = np.random.default_rng(0).permutation(len(LENGTHS))
    order = np.random.default_rng([0, 0, 0]).permutation(index)
    in_progress = sorted(corpus_folder.iterdir())[order[state["cursors"][0][0][1]]]
    before, content = in_progress.stat(), in_progress.read_text()
    in_progress.write_text(content.replace("w", "v"))
    os.utime(in_progress, ns=(before.st_atime_ns, before.st_mtime_ns))
    resumed = module(corpus_folder, numbered_tokenizer).train_dataloader()
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=in_progress.name):
        first_of(resumed, 1)
    in_progress.write_text(content)
    earlier = {**state, "cursors": [[cursor[:4] for cursor in own] for own in state["cursors"]]}  # by earlier versions
    for same in (state, earlier):
        resumed = module(corpus_folder, numbered_tokenizer).train_dataloader()
        resumed.load_state_dict(same)
        first_of(resumed, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_steps": -1}, r"`trainer\.max_steps`"),
        ({"train": None}, "`train`"),
        ({"train": "owner/name"}, "hf://"),
        ({"num_workers": 7}, "`num_workers`"),
        ({"influence": "folder"}, "`influence`"),
        ({"packing": "best_fit"}, "`packing: concat`"),
        ({"prompt_field": "question", "loss_on_prompt": False}, "`loss_on_prompt: true`"),
    ],
)
def test_what_cannot_be_streamed_is_refused(corpus_folder, byte_tokenizer, options, named):
    with pytest.raises(ValueError, match=named):
        module(corpus_folder, byte_tokenizer, **options)


def test_files_without_a_wanted_document_are_passed_over(corpus_folder, numbered_tokenizer):
    for number in range(5):
        (corpus_folder / f"{number}.jsonl").write_text(json.dumps({"text": "w1", "lang": "fr"}))
    (corpus_folder / "5.jsonl").write_text(json.dumps({"text": "w2 w3", "lang": "en"}))
    data = functools.partial(
        module, corpus_folder, numbered_tokenizer, validation=f"{corpus_folder}/5.jsonl", max_steps=2
    )
    assert rows_of(data(where=("lang", "en")).train_dataloader()) == [[11, 12, 11, 12, 11], [12, 11, 12, 11, 12]]
    nothing = data()
    nothing.where = ("lang", "de")
    with pytest.raises(ValueError, match="6 files"):
        next(iter(nothing.train_dataloader()))


def test_documents_that_are_held_out_are_not_streamed(corpus_folder, numbered_tokenizer):
    data = module(corpus_folder, numbered_tokenizer, validation=None, holdout=3, max_steps=40)
    streamed = {token for row in rows_of(data.train_dataloader()) for token in row}
    held_out = {token for row in rows_of(data.val_dataloader()) for token in row}
    assert held_out
    assert not streamed & held_out


@pytest.mark.filterwarnings("ignore:The server of these .* reports neither checksums")
@pytest.mark.slow
def test_workers_stream_from_the_web(corpus_folder, numbered_tokenizer):
    """A file system that was used before the fork hangs or is refused in the worker, if it is not made anew."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Handler, directory=corpus_folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_port}"
    options = {"train": f"{address}/*.jsonl", "validation": f"{address}/0.jsonl"}
    remote = rows_of(module(corpus_folder, numbered_tokenizer, num_workers=2, **options).train_dataloader())
    server.shutdown()
    assert remote == rows_of(module(corpus_folder, numbered_tokenizer, num_workers=2).train_dataloader())


def test_empty_documents_are_left_out_and_counted_in_the_cursor(tmp_path, numbered_tokenizer):
    for name, hole in (("a", ["", " "]), ("b", [])):
        lines = ["w1 w2 w3", *hole, "w4 w5 w6 w7", *hole, "w8 w9"] * 4
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    paths = [str(tmp_path / name / "x.jsonl") for name in "ab"]
    rows = [
        rows_of(module(tmp_path, numbered_tokenizer, train=path, validation=path).train_dataloader()) for path in paths
    ]
    assert rows[0] == rows[1]
