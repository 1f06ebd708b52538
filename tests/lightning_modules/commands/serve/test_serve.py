"""`longce serve`: requests, batches, keys, memory, processes."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import numpy as np
import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.commands.cli.main import main
from lightning_modules.commands.serve import service
from lightning_modules.commands.serve.batching import BatchingScorer
from lightning_modules.commands.serve.config import ServeConfig
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.config import ModelConfig, ServerConfig
from lightning_modules.models.loading import load_frozen
from lightning_modules.models.served.dialects import IDENTITY_HEADER, LONGCE_PATH, Span
from lightning_modules.models.served.scorer import RemoteScorer
from tests.conftest import tiny_model
from tests.lightning_modules.models.served.test_scorer import random_batch
from tests.support.servers import longce_server


@pytest.fixture(scope="module")
def backbone():
    return Backbone(tiny_model())


def post(address, ids, scored_from, **options):
    body = np.asarray(ids, dtype="<i4").tobytes()
    return httpx2.post(f"{address}{LONGCE_PATH}?scored_from={scored_from}", content=body, **options)


def test_values_match_a_slow_float64_reference(backbone):
    batch = random_batch([40, 25])
    with longce_server(backbone) as (address, _):
        values = RemoteScorer([address], ServerConfig())(batch)
    double = Backbone(tiny_model().double())
    expected = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for start, stop in ((0, 40), (40, 65)):
        logits = double.model(batch["input_ids"][:, start:stop]).logits.log_softmax(-1)
        for token in range(start + 1, stop):
            expected[0, token] = logits[0, token - start - 1, batch["input_ids"][0, token]]
    torch.testing.assert_close(values.double(), expected.detach(), atol=2e-5, rtol=1e-5)


def test_a_model_with_an_extended_context(model_dir):
    extension = {"method": "eabf", "original_length": 64, "target_length": 256}
    extended = load_frozen(ModelConfig(str(model_dir), context_extension=extension), "cpu")
    batch = random_batch([200])
    with longce_server(extended) as (address, _):
        values = RemoteScorer([address], ServerConfig())(batch)
    with torch.no_grad():
        assert torch.equal(values, extended(batch))
        assert not torch.allclose(values, load_frozen(ModelConfig(str(model_dir)), "cpu")(batch))


@pytest.mark.parametrize(
    ("ids", "scored_from", "message"),
    [
        ([1, 2, 3], "1&greedy=3", "`greedy` from 0"),
        ([1, 2, 3], 0, "from 1 to 2"),
        ([1, 2, 3], 3, "from 1 to 2"),
        ([1], 1, "from 1 to 0"),
        ([], 1, "from 1 to"),
        ([1, 400], 1, "from 0 to 399"),
        ([1, -1], 1, "from 0 to 399"),
        ([1, 2, 3], "x", "int32"),
        ([1, 2, 3], "-1", "from 1 to 2"),
        ([1, 2, 3], "9" * 5000, "int32"),
    ],
)
def test_a_request_that_makes_no_sense(backbone, ids, scored_from, message):
    with longce_server(backbone) as (address, scorer):
        answer = post(address, ids, scored_from)
    assert answer.status_code == 400
    assert message in answer.text
    assert scorer.counts["passes"] == 0


def test_bodies_that_are_too_long_or_not_whole(backbone):
    with longce_server(backbone, max_length=10) as (address, _):
        assert post(address, range(11), 1).status_code == 413
        assert httpx2.post(f"{address}{LONGCE_PATH}?scored_from=1", content=b"12345").status_code == 400
        assert len(post(address, range(10), 4).content) == 4 * 6


def test_everything_but_the_health_needs_the_key(backbone):
    with longce_server(backbone, key="hunter2", identity="sha256:1:2") as (address, _):
        assert httpx2.get(f"{address}/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics"):
            assert httpx2.get(f"{address}{path}").status_code == 401
            assert httpx2.get(f"{address}{path}", headers={"Authorization": "Bearer hunter3"}).status_code == 401
        assert post(address, [1, 2, 3], 1).status_code == 401
        headers = {"Authorization": "Bearer hunter2"}
        assert post(address, [1, 2, 3], 1, headers=headers).headers[IDENTITY_HEADER] == "sha256:1:2"
        assert "longce_passes_total 1" in httpx2.get(f"{address}/metrics", headers=headers).text


def queue_spans(scorer, lengths):
    generator = torch.Generator().manual_seed(0)
    spans = [Span(torch.randint(400, (n,), generator=generator).int().numpy(), max(1, n // 2)) for n in lengths]
    return spans, [scorer.submit(span) for span in spans]


def run_until_empty(scorer):
    scorer.run(lambda: True)


def test_spans_of_similar_length_share_a_pass(backbone, monkeypatch):
    scorer = BatchingScorer(backbone, 100)
    scorer.max_batch_tokens = 100  # as on a GPU
    spans, futures = queue_spans(scorer, [30, 90, 32, 20, 33, 31])
    sizes = []
    original = scorer._pass
    monkeypatch.setattr(scorer, "_pass", lambda spans: sizes.append(len(spans)) or original(spans))
    run_until_empty(scorer)
    assert sizes == [1, 3, 1, 1] or sorted(sizes) == [1, 1, 1, 3] or sorted(sizes) == [1, 2, 3]
    alone = BatchingScorer(backbone, 100)
    for span, future in zip(spans, futures, strict=True):
        found, expected = future.result().log_likelihood, alone._pass([span])[0].log_likelihood
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert len(found) == len(span.ids) - span.scored_from


def test_a_full_queue_asks_to_come_back(backbone):
    scorer = BatchingScorer(backbone, 100)
    scorer.max_queued_tokens = 100
    _, futures = queue_spans(scorer, [500, 50])
    assert futures[0] is not None, "the first is accepted, however long it is"
    assert futures[1] is None


def test_a_request_that_was_cancelled_does_not_end_the_server(backbone):
    scorer = BatchingScorer(backbone, 100)
    _, futures = queue_spans(scorer, [50, 20])
    futures[0].cancel()
    run_until_empty(scorer)
    assert len(futures[1].result().log_likelihood) == 10
    assert scorer.counts["passes"] == 1


def test_memory_that_runs_out_splits_a_pass_and_refuses_one_document(backbone, monkeypatch):
    scorer = BatchingScorer(backbone, 100)
    scorer.max_batch_tokens = 1000
    original = scorer._pass

    def limited(spans):
        if sum(len(span.ids) for span in spans) > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(spans)

    monkeypatch.setattr(scorer, "_pass", limited)
    _, futures = queue_spans(scorer, [50, 61, 40])
    run_until_empty(scorer)
    with pytest.raises(torch.OutOfMemoryError):
        futures[1].result()
    assert [len(futures[index].result().log_likelihood) for index in (0, 2)] == [25, 20]


def test_requests_whose_client_is_gone_leave_the_queue(backbone, monkeypatch):
    """A client that has waited too long asks again: the queue must not fill with requests that nobody waits for."""
    monkeypatch.setattr(service, "_PATIENCE", 0.02)
    with longce_server(backbone) as (address, scorer):
        release, original = threading.Event(), scorer._pass
        monkeypatch.setattr(scorer, "_pass", lambda spans: release.wait(10) and original(spans))
        for _ in range(2):
            with pytest.raises(httpx2.ReadTimeout):
                post(address, range(30), 1, timeout=0.1)
        time.sleep(0.2)
        release.set()
        assert post(address, range(20), 1).status_code == 200
    assert scorer.counts["requests"] == 3
    assert scorer.counts["tokens"] == 30 + 20, "the pass that had begun, and the last"


def test_the_client_fails_a_document_for_which_the_server_has_not_enough_memory(backbone, monkeypatch):
    with longce_server(backbone) as (address, scorer):
        client = RemoteScorer([address], ServerConfig())
        monkeypatch.setattr(scorer, "_pass", lambda spans: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(ValueError, match=r"413.*40 tokens: MemoryError"):
            client(random_batch([40]))


def test_settings_that_are_not_safe_or_not_valid(monkeypatch):
    monkeypatch.delenv("LONGCE_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"'0.0.0.0' can be reached.*LONGCE_API_KEY"):
        ServeConfig("m", host="0.0.0.0").read_key()
    assert ServeConfig("m").read_key() == ""
    monkeypatch.setenv("LONGCE_API_KEY", "hunter2")
    assert ServeConfig("m", host="0.0.0.0").read_key() == "hunter2"
    with pytest.raises(ValueError, match="belong together"):
        ServeConfig("m", certificate="a.pem")
    monkeypatch.setenv("LONGCE_API_KEY", "hunter2\n")
    with pytest.raises(ValueError, match="characters that no key has"):
        ServeConfig("m").read_key()
    for settings in ({"port": 70_000}, {"max_batch_tokens": 0}, {"max_length": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            ServeConfig("m", **settings)


@pytest.mark.limit(2)
def test_the_command_in_this_process(model_dir, caplog):
    """A client in a thread; a second SIGTERM is not needed."""
    caplog.set_level(logging.INFO)
    batch, values = random_batch([50]), []

    def use():
        while "Serving at " not in caplog.text:
            time.sleep(0.01)
        address = caplog.text.split("Serving at ")[1].split()[0]
        values.append(RemoteScorer([address], ServerConfig())(batch))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=use)
    thread.start()
    main(["serve", "--model", str(model_dir), "--port", "0", "--device", "cpu"])
    thread.join()
    with torch.no_grad():
        assert torch.equal(values[0], load_frozen(ModelConfig(str(model_dir)), "cpu")(batch))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere/"], "No model at 'nowhere/'"),
        (["--model", "MODEL", "--host", "0.0.0.0"], "LONGCE_API_KEY"),
        (["--model", "http://127.0.0.1:1"], "needs the model itself"),
        (["--model", "LEARNED", "--max_length", "5000", "--device", "cpu"], "5000 tokens"),
        (["--model", "MODEL", "--certificate", "a.pem", "--certificate_key", "b.pem"], "'a.pem'"),
        (["--model", "MODEL", "--sharded", "true", "--device", "cpu"], "several processes"),
        ([], "model"),
    ],
)
def test_errors_of_the_command_are_one_line(words, message, model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LONGCE_API_KEY", raising=False)
    tiny_model("gpt2").save_pretrained(tmp_path)
    places = {"MODEL": str(model_dir), "LEARNED": str(tmp_path)}
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *(places.get(word, word) for word in words), "--port", "0"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(model_dir, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit):
            main(["serve", "--model", str(model_dir), "--port", port, "--device", "cpu"])
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err


def start(words, environment=None):
    command = [sys.executable, "-m", "lightning_modules.commands.cli.main", *words]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    )
    addresses, lines = [], []
    for line in process.stderr:
        lines.append(line)
        if "Serving at " in line:
            addresses.append(line.split("Serving at ")[1].split()[0])
            if len(addresses) == (2 if "launch" in words else 1):
                return process, addresses
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_the_command_serves_until_a_signal(model_dir):
    process, (address,) = start(["serve", "--model", str(model_dir), "--port", "0"], {"LONGCE_API_KEY": "hunter2"})
    headers = {"Authorization": "Bearer hunter2"}
    try:
        assert httpx2.get(f"{address}/v1/models").status_code == 401
        (model,) = httpx2.get(f"{address}/v1/models", headers=headers).json()["data"]
        assert model["identity"].startswith("sha256:")
        assert model["max_model_len"] == 4096
        os.environ["LONGCE_API_KEY"] = "hunter2"
        batch = random_batch([50])
        values = RemoteScorer([address], ServerConfig())(batch)
        assert (values[batch["labels"] != IGNORE_INDEX] < 0).all()
    finally:
        os.environ.pop("LONGCE_API_KEY", None)
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "hunter2" not in process.stderr.read()


@pytest.mark.slow
def test_two_processes_serve_the_shards_of_one_model(model_dir, backbone):
    """Each process has a port; one that is idle makes the passes of the other."""
    words = ["launch", "--nproc_per_node", "2", "--", "serve", "--model", str(model_dir), "--sharded", "true"]
    process, addresses = start([*words, "--port", "0", "--device", "cpu"])
    try:
        batch = random_batch([60, 40, 30])
        values = [RemoteScorer(each, ServerConfig())(batch) for each in (addresses[:1], addresses)]
        assert torch.equal(values[0], values[1])
        local = load_frozen(ModelConfig(str(model_dir)), "cpu")
        with torch.no_grad():
            torch.testing.assert_close(values[0], local(batch), atol=1e-5, rtol=1e-5)
        time.sleep(1)
        assert torch.equal(RemoteScorer(addresses[1:], ServerConfig())(batch), values[0])
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) is not None
