import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from datamodules.sources.content import Document
from datamodules.sources.documents import TextFiles, text_folder
from datamodules.token_store import store as token_store
from datamodules.token_store import tokenize as tokenising
from datamodules.token_store.store import TokenStore, build_token_store
from datamodules.token_store.tokenize import Encoder
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.utilities import identity

FILES = (token_store.TOKENS, token_store.DOCUMENT_BOUNDARIES, token_store.MANIFEST)


@dataclass
class Texts:
    """Documents in memory that count how often they are read; an exception is raised in its turn."""

    texts: list
    version: str = "1"
    reads: list = field(default_factory=list)

    def __iter__(self):
        self.reads.append(len(self.reads))
        for number, text in enumerate(self.texts):
            if isinstance(text, BaseException):
                raise text
            yield Document(str(number), text)

    def fingerprint(self):
        return self.version


def build(source, tokenizer, cache_dir, **kwargs):
    encoder = Encoder(load_tokenizer(tokenizer), **{"add_special_tokens": False, **kwargs})
    return build_token_store(source, encoder, cache_dir=cache_dir)


def test_tokens_borders_and_end_of_text(word_tokenizer, wide_tokenizer, bos_eos_tokenizer, tmp_path):
    source = Texts(["a b", "c", "d e f"])
    store, again = (build(source, word_tokenizer, tmp_path) for _ in range(2))
    assert store.tokens.tolist() == [1, 2, 0, 3, 0, 4, 5, 6, 0]
    assert store.document_boundaries.tolist() == [0, 3, 5, 9]
    assert store.tokens.dtype == np.dtype("<u2")
    assert (store.manifest["documents"], store.manifest["tokens"]) == (3, 9)
    assert (source.reads, again.folder) == ([0], store.folder), "the second time nothing is read"
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens.tolist() == store.tokens.tolist()
    wide = build(Texts(["w69999 a", "b"]), wide_tokenizer, tmp_path)  # without a token for the end of a text
    assert (wide.tokens.tolist(), wide.tokens.dtype) == ([70_008, 1, 2], np.dtype("<u4"))
    special = build(Texts(["a b"]), bos_eos_tokenizer, tmp_path, add_special_tokens=True)
    assert special.tokens.tolist() == [8, 1, 2, 0], "the end is marked once"


TIME = 1_700_000_000


def text_file(path, text):
    """A file whose name, size and modification time say nothing of its text."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (TIME, TIME))
    return path


def tokens_of(source, tokenizer, tmp_path):
    return build(source, tokenizer, tmp_path / "cache").tokens.tolist()


def test_an_edit_that_restores_size_and_time_is_noticed_and_so_is_the_order_of_files(
    word_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(identity, "SETTLING_TIME", 0)
    file, other = text_file(tmp_path / "x.txt", "a b"), text_file(tmp_path / "y.txt", "e f")
    assert tokens_of(TextFiles((file, other)), word_tokenizer, tmp_path) == [1, 2, 0, 5, 6, 0]
    text_file(file, "c d")
    assert tokens_of(TextFiles((file, other)), word_tokenizer, tmp_path) == [3, 4, 0, 5, 6, 0]
    assert tokens_of(TextFiles((other, file)), word_tokenizer, tmp_path) == [5, 6, 0, 3, 4, 0]


def test_a_copied_or_renamed_folder_is_not_tokenized_again(word_tokenizer, tmp_path, monkeypatch):
    text_file(tmp_path / "one" / "x.txt", "a b")
    assert tokens_of(text_folder(tmp_path / "one"), word_tokenizer, tmp_path) == [1, 2, 0]
    monkeypatch.setattr(token_store, "_write_store", None)
    shutil.copytree(tmp_path / "one", tmp_path / "copy", copy_function=shutil.copyfile)
    (tmp_path / "copy" / "x.txt").rename(tmp_path / "copy" / "y.txt")
    assert tokens_of(text_folder(tmp_path / "copy"), word_tokenizer, tmp_path) == [1, 2, 0]


def test_text_that_changes_while_it_is_tokenized_is_refused(word_tokenizer, tmp_path):
    file = text_file(tmp_path / "x.txt", "a b")

    class Edited(TextFiles):
        def __iter__(self):
            yield from super().__iter__()
            text_file(file, "c d")

    with pytest.raises(ValueError, match="changed"):
        build(Edited((file,)), word_tokenizer, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize("bounds", [(1, 10**6), (10**6, 1), (2, 10**6)])
def test_batches_do_not_show(byte_tokenizer, tmp_path, monkeypatch, bounds):
    texts = ["the cat sat", "naïve café 🙂", "on the mat"]
    whole = build(Texts(texts), byte_tokenizer, tmp_path / "whole")
    monkeypatch.setattr(tokenising, "BATCH_DOCUMENTS", bounds[0])
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", bounds[1])
    split = build(Texts(texts), byte_tokenizer, tmp_path / "split")
    tokenizer = load_tokenizer(byte_tokenizer)
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert whole.tokens.tolist() == split.tokens.tolist() == expected
    assert whole.document_boundaries.tolist() == split.document_boundaries.tolist()


def test_address_depends_on_all_that_matters(word_tokenizer, bos_eos_tokenizer, tmp_path, monkeypatch):
    stores = [
        build(Texts(["a b"]), word_tokenizer, tmp_path),
        build(Texts(["a b"], version="2"), word_tokenizer, tmp_path),
        build(Texts(["a b"]), bos_eos_tokenizer, tmp_path),  # the same vocabulary
        build(Texts(["a b"]), word_tokenizer, tmp_path, add_special_tokens=True),
    ]
    monkeypatch.setattr(token_store, "FORMAT", token_store.FORMAT + 1)
    stores.append(build(Texts(["a b"]), word_tokenizer, tmp_path))
    assert len({store.folder for store in stores}) == 5


def content(store):
    return {name: (store.folder / name).read_bytes() for name in FILES}


def flip(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    path.write_bytes(damaged)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_store_is_rebuilt_with_a_message(word_tokenizer, tmp_path, caplog, name, damage):
    source = Texts(["a b c", "d"])
    store = build(source, word_tokenizer, tmp_path)
    whole = content(store)
    damage(store.folder / name)
    if name != token_store.TOKENS or damage is not flip:  # tokens are many: opening alone does not read them
        with pytest.raises(ValueError, match=name):
            TokenStore(store.folder)
    assert content(build(source, word_tokenizer, tmp_path)) == whole
    assert caplog.text.count("rebuilding it") == 1
    assert name in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [store.folder.name]
    build(source, word_tokenizer, tmp_path)
    assert source.reads == [0, 1]


def test_tokens_are_read_in_full_only_if_files_have_changed(word_tokenizer, tmp_path, monkeypatch):
    source, full = Texts(["a b c"]), []
    store = build(source, word_tokenizer, tmp_path)
    monkeypatch.setattr(
        TokenStore, "_check_content", lambda _, name: full.append(name) if name == token_store.TOKENS else None
    )
    build(source, word_tokenizer, tmp_path)
    assert full == []  # nothing has changed since it was written
    for change in (lambda: (store.folder / token_store.TOKENS).touch(), (store.folder / token_store.VERIFIED).unlink):
        change()
        build(source, word_tokenizer, tmp_path)
        build(source, word_tokenizer, tmp_path)
        assert len(full) == 1
        full.clear()
    (store.folder / token_store.VERIFIED).write_text('{"tokens.bin')  # torn by a kill
    build(source, word_tokenizer, tmp_path)
    assert len(full) == 1
    assert source.reads == [0]
    shutil.rmtree(store.folder)  # by another process, that has found it damaged
    with pytest.raises(ValueError, match="is damaged"):
        store.verify()


@dataclass
class Slow:
    """Documents that may take a while; every reading leaves a mark in a file."""

    marks: Path
    pause: float = 0.0

    def __iter__(self):
        with self.marks.open("a") as file:
            file.write("x")
        for number in range(30):
            time.sleep(self.pause)
            sys.audit("document", self.marks.parent)
            yield Document(str(number), "abcdefgh"[number % 8] + " b" * number)

    def fingerprint(self):
        return "slow"


def build_and_die(moment, source, encoder, cache_dir):
    """Build a store in a process that is killed at one of its documents and operations on files, by their number."""
    moments, passed = ("document", "open", "os.mkdir", "os.rename", "os.remove"), 0

    def count(event, arguments):
        nonlocal passed
        if event in moments and str(cache_dir.parent) in str(arguments):
            passed += 1
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    build_token_store(source, encoder, cache_dir=cache_dir)


def in_background(function, *arguments, **options):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, kwargs=options)
    process.start()
    return process


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_document_or_file_leaves_nothing_torn(step, word_tokenizer, tmp_path, monkeypatch):
    """At each moment, or at each fourth one."""
    monkeypatch.setattr(tokenising, "BATCH_DOCUMENTS", 3)
    encoder, source, cache = (
        Encoder(load_tokenizer(word_tokenizer), add_special_tokens=False),
        Slow(tmp_path / "marks"),
        tmp_path / "cache",
    )
    undisturbed = content(build_token_store(source, encoder, cache_dir=tmp_path / "undisturbed"))
    unfinished = whole = 0
    for moment in itertools.count(1, step):
        process = in_background(build_and_die, moment, source, encoder, cache)
        process.join()
        unfinished += any(cache.glob(".building-*"))
        for folder in cache.glob("[!.]*"):
            store = TokenStore(folder)
            store.verify()
            assert content(store) == undisturbed
            shutil.rmtree(folder)
            whole += 1
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert unfinished > 30 / step
    assert whole > 1 / step, "killed after the store was there"
    source.marks.unlink()
    slow = Slow(tmp_path / "marks", pause=0.002)
    processes = [in_background(build_token_store, slow, encoder, cache_dir=cache) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert source.marks.read_text() == "x", "of several processes at once, one tokenizes"
    # Only folders count: a process that is killed while it takes over a lock may leave an empty file.
    (folder,) = (entry for entry in cache.iterdir() if entry.is_dir())
    assert content(TokenStore(folder)) == undisturbed


def test_ids_beyond_the_vocabulary_are_refused(word_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "vocabulary_size", lambda _: 3)
    with pytest.raises(ValueError, match="token 3"):
        build(Texts(["a b c"]), word_tokenizer, tmp_path)


def test_prompts_are_kept_where_there_are_some(word_tokenizer, tmp_path):
    plain = build(Texts(["a b c"]), word_tokenizer, tmp_path / "plain")
    assert plain.prompt_spans is None
    assert not (plain.folder / token_store.PROMPT_SPANS).exists()

    class Prompts(Texts):
        def __iter__(self):
            return (Document("", text, prompt_end) for text, prompt_end in self.texts)

    store = build(Prompts([("a b c", 3), ("a", 0), ("a b", 3)]), word_tokenizer, tmp_path / "prompts")
    assert store.prompt_spans.tolist() == [[0, 2], [6, 8]]  # a b c <eos> | a <eos> | a b <eos>
    flip(store.folder / token_store.PROMPT_SPANS)
    with pytest.raises(ValueError, match=r"prompt_spans\.bin"):
        TokenStore(store.folder)
    again = build(Prompts([("a b c", 3)]), word_tokenizer, tmp_path / "prompts")  # what is damaged is built anew
    assert again.prompt_spans.tolist() == [[0, 2]]
