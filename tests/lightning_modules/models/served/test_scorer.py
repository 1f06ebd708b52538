"""Faults of servers and what becomes of them: every value is right or refused, and none is lost."""

import logging
import math
import os
import re
import resource
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.loading.config import ModelConfig, ServerConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.loading.load import load_config
from lightning_modules.models.served.dialects import AnswerError
from lightning_modules.models.served.scorer import RemoteScorer, connect
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.tasks.teacher_forcing import padded_rows
from lightning_modules.utilities.errors import IncompleteError
from tests.support.servers import ENDLESS, StubServer, stub_greedy, stub_server, stub_values

BATCH = pack_sequence([torch.arange(20)])
DIALECTS = ("vllm", "sglang")
QUICK = {"timeout": 60.0, "patience": 60.0, "concurrency": 4}  # which end no request, however busy the machine is


@contextmanager
def served(*arguments):
    """Yield a stub server and a scorer that uses it."""
    with stub_server(*arguments) as server:
        yield server, RemoteScorer([server.address], ServerConfig(**QUICK))


def random_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return pack_sequence([torch.randint(300, (length,), generator=generator) for length in lengths])


def expected_values(batch, model="a"):
    values = torch.zeros(batch["labels"].shape)
    for row, boundaries in enumerate(batch["document_boundaries"]):
        for start, stop in pairwise(boundaries):
            values[row, start:stop] = torch.from_numpy(stub_values(batch["input_ids"][row, start:stop].tolist(), model))
    return values.masked_fill(batch["labels"].eq(IGNORE_INDEX), 0.0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scores_each_document_of_a_packed_sequence(dialect):
    batch = random_batch([40, 1, 17, 2])
    batch["labels"][0, 5:20] = IGNORE_INDEX
    batch["labels"][0, 35:40] = IGNORE_INDEX  # these tokens need not be sent
    with served(dialect) as (_, scorer):
        values = scorer(batch)
    assert torch.equal(values, expected_values(batch))
    assert scorer.identity.startswith("served:")
    assert "3 requests, 54 tokens, 0 requests repeated" in scorer.report()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_likeliest_tokens_are_those_of_argmax(dialect):
    ids = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    batch = padded_rows(ids.tolist(), torch.device("cpu"))
    places = [slice(12, 20), slice(20, 20)]
    with served(dialect) as (server, scorer):
        values, greedy = scorer.with_greedy(batch, places)
        assert torch.equal(values, expected_values(batch))
        ids = ids[0].tolist()
        expected = torch.zeros_like(greedy)
        expected[0, 12:] = torch.tensor(stub_greedy(ids, stub_values(ids))[12:])
        assert torch.equal(greedy, expected)
        assert 0 < int((expected[0] == batch["input_ids"][0])[12:].sum()) < 8
        server.fault = "greedy"  # ignores that they are wanted
        with pytest.raises(AnswerError, match=re.escape(server.address)):
            scorer.with_greedy(batch, places)


RETRIED = ("429", "503", "500", "reset", "truncated", "slow")
REFUSED = (
    "400",
    "413",
    "ignored",
    "short",
    "nan",
    "positive",
    "clamped",
    "text",
    "damaged",
    "other_ids",
    "huge",
    "gzip",
)
ENDED = ("301", "403", "404")


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", [*RETRIED, *REFUSED, *ENDED])
def test_a_faulty_answer_is_repeated_or_refused_and_never_used(dialect, fault):
    batch = random_batch([30, 20, 10])
    with stub_server(dialect) as server:
        seconds = 1.0 if fault == "slow" else QUICK["timeout"]
        scorer = RemoteScorer([server.address], ServerConfig(**{**QUICK, "timeout": seconds}))
        server.faults.append(fault)
        if fault in RETRIED:
            assert torch.equal(scorer(batch), expected_values(batch))
            assert "1 requests repeated" in scorer.report()
            return
        with pytest.raises(ValueError, match=re.escape(server.address)) as caught:
            scorer(batch)
        assert isinstance(caught.value, AnswerError) == (fault in REFUSED)
        if fault in ("403", "404"):  # the body of a 403 may repeat parts of the key
            assert ("no None" in str(caught.value)) == (fault == "404")
        assert torch.equal(scorer(batch), expected_values(batch)), "the next document is scored"


@pytest.mark.parametrize("fault", ["400", "ignored"])
def test_no_document_is_blamed_for_a_server_that_has_no_scores_any_more(fault):
    with served() as (server, scorer):
        server.fault = fault
        with pytest.raises(ValueError, match="restore the server") as caught:
            scorer(random_batch([30]))
        assert not isinstance(caught.value, AnswerError)


@pytest.mark.parametrize("fault", ENDLESS)
def test_a_reply_without_end_ends(fault):
    """The time for single reads and compression bound neither time nor memory."""
    settings = {"timeout": 1.0, "patience": 1.0}
    with stub_server() as server:
        scorer = RemoteScorer([server.address], ServerConfig(**settings))
        server.fault = fault
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Requests of the fixed text have no usable reply, either: the command ends.
        expected = ValueError if fault in ("flood", "bomb") else IncompleteError
        with pytest.raises(expected, match=re.escape(server.address)) as caught:
            scorer(random_batch([30]))
        assert not isinstance(caught.value, AnswerError)
        with pytest.raises(ValueError, match=re.escape(server.address)):
            RemoteScorer([server.address], ServerConfig(**settings))
        assert time.monotonic() - started < 60
        # In kilobytes; the stub itself has a few of them.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        server.fault = None
        batch = random_batch([30])
        assert torch.equal(scorer(batch), expected_values(batch)), "the next document is scored"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_values_are_noticed_at_the_start(dialect, shift, monkeypatch):
    with stub_server(dialect) as server:
        if shift == 1:  # entry t is about token t + 1
            server.shift = 1
        else:
            monkeypatch.setattr("tests.support.servers.stub_values", lambda ids, model: shifted_back(ids, model))
        with pytest.raises(ValueError, match="values of other tokens"):
            RemoteScorer([server.address], ServerConfig(**QUICK))


def shifted_back(ids, model):
    values = stub_values(ids, model)
    return np.concatenate([values[:1], values[:-1]])


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "llamacpp"},
        {"owner": "transformers", "dialect": "vllm", "fault": "ignored"},
        {"fault": "ignored"},
        {"fault": "hello"},
        {"fault": "down"},
    ],
)
def test_an_unsuitable_server_is_refused(change):
    with stub_server("vllm") as server:
        vars(server).update(change)
        with pytest.raises(ValueError, match=re.escape(server.address)):
            RemoteScorer([server.address], ServerConfig(**QUICK))


def test_an_explicit_dialect_overrides_the_owner_but_not_the_probe():
    batch = random_batch([9])
    with stub_server("vllm") as server:
        server.owner = "my company"
        scorer = RemoteScorer([server.address], ServerConfig(dialect="vllm", **QUICK))
        assert torch.equal(scorer(batch), expected_values(batch))
        with pytest.raises(ValueError, match="404"):
            RemoteScorer([server.address], ServerConfig(dialect="sglang", **QUICK))


def test_a_process_can_use_an_address_again_after_its_model_has_changed():
    with stub_server() as server:
        config = ModelConfig(server.address, server=ServerConfig(**QUICK))
        assert connect(config) is connect(config)
        first, server.name = model_identity(config), "other"
        with pytest.raises(ValueError, match="another model"):
            model_identity(config)
        assert model_identity(config) != first


def test_one_of_several_models_must_be_chosen(monkeypatch):
    with stub_server("vllm") as server:
        models = [*server.models(), {**server.models()[0], "id": "adapter"}]
        monkeypatch.setattr(server, "models", lambda: models)
        with pytest.raises(ValueError, match=r"adapter, tiny: set `server.model`"):
            RemoteScorer([server.address], ServerConfig(**QUICK))
        with pytest.raises(ValueError, match=r"adapter, tiny: set `server.model`"):
            RemoteScorer([server.address], ServerConfig(model="other", **QUICK))
        assert RemoteScorer([f"{server.address}/"], ServerConfig(model="adapter", **QUICK)).identity


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("rename", [True, False])
def test_another_model_behind_the_address_after_a_restart(dialect, rename):
    batch = random_batch([30])
    with served(dialect) as (server, scorer):
        scorer(batch)
        port = server.server_port
    with stub_server(dialect, port) as server:
        server.model, server.name = "b", "other" if rename else "tiny"
        with pytest.raises(ValueError, match=r"another model|nats differently"):
            scorer(batch)
        with pytest.raises(ValueError, match=r"another model|nats differently"):
            scorer.verify()


def test_another_model_behind_the_address_without_any_failure():
    """A proxy may keep the connection, and send requests to another server."""
    with served("vllm") as (server, scorer):
        before = len(server.seen)
        scorer(random_batch([30, 20]))
        assert len(server.seen) == before + 3, "one probe for all documents of a batch"
        server.model = "b"
        with pytest.raises(ValueError, match="nats differently"):
            scorer(random_batch([30, 20]))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_another_model_in_a_later_run_needs_another_claim(dialect):
    with stub_server(dialect) as server:
        first = RemoteScorer([server.address], ServerConfig(**QUICK)).identity
        assert RemoteScorer([server.address], ServerConfig(**QUICK)).identity == first
        server.model = "b"
        with pytest.raises(ValueError, match=r"in an earlier run.*`server.claim`"):
            RemoteScorer([server.address], ServerConfig(**QUICK))
        assert RemoteScorer([server.address], ServerConfig(claim="b@main", **QUICK)).identity != first


def test_two_servers_share_the_work():
    batch = random_batch([30 + index for index in range(60)])
    with stub_server() as slow, stub_server() as fast:
        scorer = RemoteScorer([slow.address, fast.address], ServerConfig(**QUICK))
        before = [len(server.seen) for server in (slow, fast)]
        slow.gate.clear()
        threading.Thread(target=open_after, args=(slow.gate, fast, before[1] + 40), daemon=True).start()
        assert torch.equal(scorer(batch), expected_values(batch))
        after = [len(server.seen) for server in (slow, fast)]
    answered = [end - start for start, end in zip(before, after, strict=True)]
    assert sum(answered) >= 60  # and probes of new connections
    assert 0 < answered[0] < answered[1], "the faster one scores more"


def open_after(gate, server, requests):
    """Open the gate of another server when this one has seen so many requests."""
    while len(server.seen) < requests:
        time.sleep(0.001)
    gate.set()


def test_a_server_that_is_away_for_a_moment_must_come_back_with_the_same_model():
    batch = random_batch([30 + index for index in range(20)])
    with served() as (server, scorer):
        server.fault, server.refusals = "down", 6
        assert torch.equal(scorer(batch), expected_values(batch))
        server.fault, server.refusals = "down", 3
        scorer.verify()
        assert server.fault is None, "it was away"
        server.model = "b"
        for _ in range(2):  # the other model is not taken for the one before
            with pytest.raises(ValueError, match=r"another model|nats differently"):
                scorer.verify()


def test_a_fork_does_not_share_connections():
    with stub_server() as server:
        config = ModelConfig(server.address, server=ServerConfig(**QUICK))
        scorer = connect(config)
        with warnings.catch_warnings(action="ignore"):  # Python warns of forks with threads
            child = os.fork()
        if child == 0:  # no exception may leave the fork
            with suppress(BaseException), pytest.raises(RuntimeError, match="forked"):
                scorer(random_batch([20]))
            with suppress(BaseException):
                is_same = connect(config) is scorer or not torch.equal(connect(config)(BATCH), expected_values(BATCH))
                os._exit(int(is_same))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_two_servers_must_have_the_same_model():
    with stub_server() as one, stub_server() as other:
        for change in ({"model": "b"}, {"name": "other"}):  # with other values, or of another name
            vars(other).update(change)
            with pytest.raises(ValueError, match=r"nats differently|have different models"):
                RemoteScorer([one.address, other.address], ServerConfig(**QUICK))


@pytest.mark.parametrize("fault", ["503", "500", "down"])
def test_an_outage_ends_the_run_after_the_patience(fault):
    with stub_server() as server:
        scorer = RemoteScorer([server.address], ServerConfig(timeout=60, patience=0.3))
        server.fault = fault
        with pytest.raises(IncompleteError, match=r"`server.patience`.*same command again"):
            scorer(random_batch([30]))


def test_a_request_that_always_fails_is_given_up_and_not_the_others():
    batch_of_two = random_batch([30, 20])
    with served() as (server, scorer):
        server.poison = ",".join(map(str, batch_of_two["input_ids"][0, :30].tolist())).encode()
        with pytest.raises(AnswerError, match="failed 4 times with 30 tokens"):
            scorer(batch_of_two)
        batch = random_batch([20])
        assert torch.equal(scorer(batch), expected_values(batch))


def test_a_document_beyond_the_servers_limits_is_refused_before_it_is_sent():
    with stub_server("vllm") as server:
        server.limit = 100
        scorer = RemoteScorer([server.address], ServerConfig(**QUICK))
        sent = len(server.seen)
        scorer.check_length(99)  # vLLM has to generate one more
        with pytest.raises(ValueError, match=r"100 tokens.*99"):
            scorer(random_batch([100]))
        assert len(server.seen) == sent


@pytest.mark.parametrize(
    "address",
    [
        "http://10.0.0.1:8000",
        "http://[2001:db8::1]:9",
        "http://me:hunter2@127.0.0.1:80",
        "http://127.0.0.1:80?key=hunter2",
        "ftp://127.0.0.1",
        "http://127.0.0.1:99999",
        "https://10.0.0.300:8000",
    ],
)
def test_addresses_that_are_not_safe(address):
    uses = [lambda: RemoteScorer([address], ServerConfig(**QUICK))]
    if "hunter2" in address:  # wherever a model is named
        uses += [lambda: open_evaluator(EvaluatorConfig(address)), lambda: load_config(ModelConfig(address))]
    for use in uses:
        with pytest.raises(ValueError, match="http") as caught:
            use()
        assert "hunter2" not in str(caught.value)


def test_the_key_is_sent_and_appears_nowhere(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "hunter2")
    with stub_server("vllm") as server:
        server.key = "hunter2"
        config = ServerConfig(key_variable="MY_KEY", timeout=60, patience=0.1)
        scorer = RemoteScorer([server.address], config)
        assert server.seen[-1][1] == "Bearer hunter2"
        server.fault = "500"
        with pytest.raises(IncompleteError, match=r"Bearer \*\*\*") as caught:
            scorer(random_batch([30]))
        assert "hunter2" not in str(caught.value)
        server.fault, server.key = None, "renewed"  # and the server repeats the old one in its answer
        with pytest.raises(ValueError, match=r"key in.*MY_KEY") as caught:
            scorer(random_batch([30]))
    chain = f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert "hunter2" not in chain + caplog.text + repr(config) + scorer.identity
    monkeypatch.setenv("MY_KEY", "hunter2\n")
    with pytest.raises(ValueError, match="MY_KEY") as caught:
        RemoteScorer([server.address], config)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="not the key"):
        ServerConfig(key_variable="sk-hunter2")


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"timeout": 0.0}, {"patience": -1.0}, {"patience": math.nan}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.*{next(iter(settings.values()))}"):
        ModelConfig("http://localhost", server=settings)


def interrupt(future):
    raise KeyboardInterrupt


def test_ctrl_c_cancels_the_requests(monkeypatch):
    server = StubServer("vllm")
    scorer = RemoteScorer([server.address], ServerConfig(**QUICK))
    server.gate.clear()
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scorer(random_batch([30] * 100))
    server.gate.set()
    scorer(random_batch([30] * 100))  # while those that were not cancelled would be answered as well
    server.end()
    assert 100 < len(server.seen) < 130
