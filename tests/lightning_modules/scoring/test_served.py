"""The commands and the callback with models on servers: the same numbers as with the models in this process."""

import contextlib
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import time
from dataclasses import replace
from functools import partial
from signal import SIGKILL

import httpx2
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from callbacks import ExternalEvaluator, StepCheckpoint
from datamodules import PG19DataModule
from lightning_modules.functional.top_tokens import with_greedy
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading import load as loading
from lightning_modules.models.loading.config import ModelConfig, ServerConfig
from lightning_modules.models.loading.load import load_frozen
from lightning_modules.models.served.scorer import RemoteScorer
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig, InspectConfig
from lightning_modules.scoring.corpus.shards import SUCCESS
from lightning_modules.scoring.key_tokens import find_key_tokens
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, read_answers
from lightning_modules.tasks.evaluation.questions import put_questions
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.utilities.errors import IncompleteError
from longce.cli.main import main
from longce.corpus.config import CorpusConfig
from longce.corpus.score import score_corpus
from longce.evaluate import evaluate
from longce.influence import InfluenceTrainer
from tests.conftest import make_text, tiny_model
from tests.support.adapters import export_adapters
from tests.support.servers import stub_server
from tests.support.texts import write_books
from tests.support.toy_tasks import GUESS, SEVERAL
from tests.support.trainers import quiet_trainer

SETTINGS = {"context_length": 32, "stride": 16}
QUICK = ServerConfig(timeout=20.0, patience=20.0, concurrency=4)


@pytest.fixture(scope="module")
def backbone(model_dir):
    return load_frozen(ModelConfig(str(model_dir)), "cpu")


@pytest.fixture
def served(backbone):
    with stub_server(backbone=backbone) as server:
        yield server.address, server


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(make_text(150, seed=3))
    return str(path)


def served_config(address, model_dir, **settings):
    return EvaluatorConfig(address, tokenizer=str(model_dir), server=QUICK, **{**SETTINGS, **settings})


@pytest.mark.slow
def test_an_evaluator_on_a_server_gives_the_scores_of_the_same_model_here(served, model_dir, text_file):
    address, server = served
    text = make_text(150, seed=3)
    local = open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS)).scores(text)
    evaluator = open_evaluator(served_config(address, model_dir))
    remote = evaluator.scores(text)
    assert torch.equal(remote.token_ids, local.token_ids)
    torch.testing.assert_close(remote.long, local.long, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(remote.short, local.short, atol=1e-6, rtol=1e-6)
    evaluator.release()  # probes once more
    # Scores are stored, for the same server only.
    asked = server.counts["requests"]
    again = open_evaluator(served_config(address, model_dir))
    assert torch.equal(again.scores(text).long, remote.long)
    assert server.counts["requests"] - asked < 8, "only probes"
    assert again.path(local.text_sha256) != open_evaluator(EvaluatorConfig(str(model_dir), **SETTINGS)).path(
        local.text_sha256
    )
    assert remote.evaluator.startswith("served:")


def test_score_with_an_evaluator_and_a_model_on_servers(served, backbone, model_dir, text_file):
    address, _ = served
    limits = {"alpha": 0.5, "beta": -6.0, **SETTINGS}
    (local,) = score([text_file], str(model_dir), str(model_dir), **limits)
    assert local.sums.key_tokens > 3
    tokenizers = {"evaluator_tokenizer": str(model_dir), "model_tokenizer": str(model_dir)}
    for model, evaluator in ((address, address), (str(model_dir), address), (address, str(model_dir))):
        (remote,) = score([text_file], model, evaluator, **tokenizers, **limits, server=QUICK)
        assert remote.sums.key_tokens == local.sums.key_tokens
        assert remote.sums.numbers() == pytest.approx(local.sums.numbers(), rel=1e-6)


@pytest.mark.slow
def test_options_of_a_server_on_the_command_line(served, model_dir, text_file, tmp_path, capsys):
    (address, _), spelled = served, ["--server.patience", "1"]
    lengths = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    scored = ["--evaluator", address, "--evaluator_tokenizer", str(model_dir), *lengths, *spelled]
    main(["score", text_file, "--model", str(model_dir), *scored])
    main(["inspect", text_file, "--alternatives", "0", "--output", str(tmp_path / "a.html"), *scored])
    tasks = ["--tasks", GUESS, "--lengths", "48", "--samples", "2", "--mode", "teacher_forced"]
    output = ["--output", str(tmp_path / "tasks"), "--tokenizer", str(model_dir)]
    main(["evaluate", "--model", address, *tasks, *output, *spelled])
    assert "corpus of 1" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_are_scored_and_served_unmerged(tmp_path, tokenizer, text_file):
    export_adapters(tmp_path, tokenizer)
    kept, merged = (str(tmp_path / name) for name in ("kept", "merged"))
    with stub_server(backbone=load_frozen(ModelConfig(kept), "cpu")) as server:
        tokenizers = {"evaluator_tokenizer": kept, "model_tokenizer": kept, "server": QUICK}
        settings = {"alpha": 0.5, "beta": -6.0, **SETTINGS}
        (served,) = score([text_file], server.address, server.address, **tokenizers, **settings)
    (local,), (of_merged,) = (score([text_file], name, name, **settings) for name in (kept, merged))
    for name in ("longppl", "perplexity"):
        own = getattr(local.sums, name)
        assert getattr(served.sums, name) == pytest.approx(own, rel=1e-6)
        assert own == pytest.approx(getattr(of_merged.sums, name), rel=1e-4)
    assert served.sums.key_tokens == local.sums.key_tokens > 3
    with pytest.raises(ValueError, match="cannot be trained further"):
        LongContextLM(kept, **SETTINGS).check_early(64)


@pytest.mark.slow
def test_a_served_model_needs_its_tokenizer_and_has_no_logits(served):
    address, _ = served
    with pytest.raises(ValueError, match="`--evaluator_tokenizer`"):
        open_evaluator(EvaluatorConfig(address, **SETTINGS))
    with pytest.raises(ValueError, match="`alternatives` to 0"):
        InspectConfig(evaluator=address, **SETTINGS)


@pytest.fixture
def vllm(tmp_path, tokenizer):
    """The folder and address of a model on vLLM, whose executable `LONGCE_TEST_VLLM` names."""
    if (executable := os.environ.get("LONGCE_TEST_VLLM")) is None:
        pytest.skip("vLLM has its own environment: set LONGCE_TEST_VLLM to the path of its executable `vllm`.")
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    tiny_model("llama", len(tokenizer), num_attention_heads=2, num_key_value_heads=1, head_dim=64).save_pretrained(
        folder
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-batched-tokens 512 --host 127.0.0.1"
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [executable, "serve", str(folder), "--port", str(port), *limits.split()]
    process = subprocess.Popen(
        command, env={**os.environ, **on_cpu}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(1)
        yield folder, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_vllm_gives_the_same_key_tokens(vllm):
    folder, address = vllm
    text, settings = make_text(600, seed=2), {"alpha": 0.5, "beta": -6.0, "context_length": 128, "stride": 64}
    local = open_evaluator(EvaluatorConfig(str(folder), **settings))
    remote = open_evaluator(EvaluatorConfig(address, tokenizer=str(folder), server=QUICK, **settings))
    scores = [each.scores(text) for each in (local, remote)]
    torch.testing.assert_close(scores[1].long, scores[0].long, atol=2e-4, rtol=0)
    torch.testing.assert_close(scores[1].short, scores[0].short, atol=2e-4, rtol=0)
    keys = [find_key_tokens(each, alpha=0.5, beta=-6.0).mask for each in scores]
    assert torch.equal(*keys)
    assert keys[0].sum() > 5
    batch = encode_document(text, load_tokenizer(str(folder)))
    places = [slice(100, batch["input_ids"].shape[1])]
    greedy = load_frozen(ModelConfig(str(folder)), "cpu")(batch, head_fn=partial(with_greedy, places=places))[1]
    assert torch.equal(RemoteScorer([address], QUICK).with_greedy(batch, places)[1], greedy)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    root = tmp_path_factory.mktemp("books")
    texts = [make_text(120, seed=number) for number in range(3)]
    write_books(root, train=texts, validation=texts)
    return root


def make_trainer(root, *callbacks, **settings):
    saves = any(isinstance(each, StepCheckpoint) for each in callbacks)
    return quiet_trainer(root, *callbacks, enable_checkpointing=saves, **settings)


def evaluator_callback(evaluator, model_dir, **settings):
    options = {"tokenizer": str(model_dir), "server": QUICK, "alpha": 0.5, "beta": -6.0, **SETTINGS}
    return ExternalEvaluator(evaluator, **{**options, **settings})


@pytest.mark.slow
def test_fit_and_validate_with_models_on_servers(served, model_dir, books, tmp_path, monkeypatch):
    address, server = served
    loaded, load = [], loading.load_frozen
    monkeypatch.setattr(loading, "load_frozen", lambda *arguments: loaded.append(1) or load(*arguments))
    data = PG19DataModule(str(model_dir), path=str(books), sequence_length=64, cache_dir=str(tmp_path / "cache"))
    values = []
    for evaluator in (address, str(model_dir)):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path, evaluator_callback(evaluator, model_dir), max_steps=2)
        trainer.fit(LongContextLM(str(model_dir), **SETTINGS), data)
        values.append({name: float(trainer.callback_metrics[name]) for name in ("val/longppl", "val/key_tokens")})
        assert bool(loaded) == (evaluator != address), "a served evaluator takes no memory here"
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    asked = server.counts["tokens"]
    trainer = make_trainer(tmp_path, evaluator_callback(address, model_dir), max_steps=2)
    trainer.fit(LongContextLM(str(model_dir), **SETTINGS), data)  # a run that was killed and starts again
    assert server.counts["tokens"] - asked < 1000, "the scores are stored, and only probes are asked for"
    # The judged model on a server as well
    results = []
    for model in (address, str(model_dir)):
        trainer = make_trainer(tmp_path, evaluator_callback(address, model_dir))
        results.append(trainer.validate(LongContextLM(model, server=QUICK, **SETTINGS), data, verbose=False)[0])
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    with pytest.raises(ValueError, match=r"server.*needs the model itself"):
        make_trainer(tmp_path, max_steps=2).fit(LongContextLM(address, server=QUICK, **SETTINGS), data)


def fit(root, model_dir, books, evaluator, *, checkpoint=None, killed_at=None, **settings):
    """Metrics of a training with three evaluations; it may be killed after a step."""
    server = replace(QUICK, patience=60.0)
    callback = evaluator_callback(evaluator, model_dir, cache_dir=f"{root}/scores", server=server)
    checkpoints = StepCheckpoint(f"{root}/checkpoints", save_last=True, every_n_train_steps=1)
    found = []
    note = LambdaCallback(
        on_validation_end=lambda trainer, _: (
            trainer.sanity_checking or found.append(float(trainer.callback_metrics["val/longppl"]))
        ),
        on_train_batch_start=lambda trainer, *_: trainer.global_step == killed_at and os.kill(os.getpid(), SIGKILL),
    )
    trainer = make_trainer(root, callback, checkpoints, note, max_steps=4, val_check_interval=2, **settings)
    data = PG19DataModule(model_dir, path=books, sequence_length=64, cache_dir=f"{root}/cache", batch_size=1)
    torch.manual_seed(0)
    trainer.fit(LongContextLM(model_dir, **SETTINGS), data, ckpt_path=checkpoint)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_training_that_is_killed_resumes_with_the_same_metrics(served, model_dir, books, tmp_path):
    address, server = served
    expected = fit(tmp_path / "whole", str(model_dir), str(books), address)
    arguments = (str(tmp_path / "killed"), str(model_dir), str(books), address)
    process = multiprocessing.get_context("spawn").Process(target=fit, args=arguments, kwargs={"killed_at": 3})
    process.start()
    process.join()
    assert process.exitcode == -SIGKILL
    asked = server.counts["requests"]
    resumed = fit(*arguments, checkpoint=f"{tmp_path}/killed/checkpoints/last.ckpt")
    assert resumed == expected[-1:]
    assert server.counts["requests"] - asked < 10, "only probes"


def score_folder(root, output, model, model_dir, **options):
    settings = {"tokenizer": str(model_dir), "key_column": "id", "dtype": "float32", "server": QUICK, "device": "cpu"}
    settings |= {"per_token": "float32", "shard_rows": 50, **SETTINGS}
    score_corpus([str(root / "corpus")], CorpusConfig(model=model, output=str(output), **{**settings, **options}))
    return rows(output)


def rows(output):
    tables = [pyarrow.parquet.read_table(path) for path in sorted(output.glob("*.parquet"))]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["row"])


def write_corpus(root, documents):
    (root / "corpus").mkdir()
    lines = [json.dumps({"id": f"d{n}", "text": make_text(5 + 3 * (n % 11), n)}) for n in range(documents)]
    (root / "corpus" / "a.jsonl").write_text("\n".join(lines))


@pytest.mark.slow
def test_a_corpus_on_two_servers_that_fail_now_and_then(backbone, model_dir, tmp_path):
    write_corpus(tmp_path, 300)
    expected = score_folder(tmp_path, tmp_path / "local", str(model_dir), model_dir)
    with stub_server(backbone=backbone) as one, stub_server(backbone=backbone) as other:
        other.faults.extend([None] * 20 + ["500", None, "reset", None, "503", None, None] * 50)  # after the start
        addresses = f"{one.address},{other.address}"
        found = score_folder(tmp_path, tmp_path / "served", addresses, model_dir, batch_tokens=8000)
        assert min(one.counts["requests"], other.counts["requests"]) > 50
    assert len(found) == 300
    assert (tmp_path / "served" / SUCCESS).exists()
    for one, other in zip(found, expected, strict=True):
        assert one["key"] == other["key"]
        assert one["lcl"][1:] == pytest.approx(other["lcl"][1:], abs=1e-6)
        same = {name: value for name, value in one.items() if isinstance(value, float)}
        assert same == pytest.approx({name: other[name] for name in same}, abs=1e-5)


@pytest.mark.slow
def test_a_corpus_resumes_after_an_outage_and_refuses_another_model(model_dir, tmp_path, caplog):
    write_corpus(tmp_path, 60)
    output = tmp_path / "scores"
    with stub_server("vllm") as server:
        options = {"server": ServerConfig(timeout=20.0, patience=0.5), "batch_tokens": 500}
        server.faults.extend([None] * 30 + ["503"] * 1000)  # in the middle of the corpus
        with pytest.raises(IncompleteError, match="same command again"):
            score_folder(tmp_path, output, server.address, model_dir, **options)
        done = len(rows(output))
        assert done < 60
        server.faults.clear()
        caplog.set_level(logging.INFO)
        score_folder(tmp_path, output, server.address, model_dir, **options)
        assert sorted(row["row"] for row in rows(output)) == list(range(60))
        assert "requests repeated" in caplog.text


@pytest.mark.slow
def test_a_document_that_the_server_refuses_fails_alone(model_dir, tmp_path):
    write_corpus(tmp_path, 12)
    with stub_server("vllm") as server:
        server.limit = 60
        found = score_folder(
            tmp_path, tmp_path / "scores", server.address, model_dir, batch_tokens=2000, allowed_failures=1.0
        )
    failed = [row for row in found if row["error"]]
    assert failed
    assert all("longer than the 59" in row["error"] for row in failed)
    assert len(found) == 12 > len(failed)


@pytest.mark.slow
def test_token_weights_of_a_served_evaluator(served, model_dir, books, tmp_path):
    address, _ = served
    stored = []
    for number, evaluator in enumerate((address, str(model_dir))):
        cache = str(tmp_path / f"cache{number}")
        data = PG19DataModule(str(model_dir), path=str(books), sequence_length=64, cache_dir=cache)
        trainer = InfluenceTrainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
        )
        options = {"evaluator_tokenizer": str(model_dir), "output": str(tmp_path / f"weights{number}")}
        module = LongContextLM(str(model_dir), **SETTINGS)
        trainer.influence(module, data, evaluator, evaluator_server=QUICK, evaluator_dtype="float32", **options)
        files = sorted((tmp_path / f"weights{number}").rglob("*.bin"))
        stored.append([path.read_bytes() for path in files])
    assert len(stored[0]) > 0
    assert stored[0] == stored[1]


@pytest.mark.slow
def test_the_accuracy_of_an_evaluator_on_a_server(served, model_dir, tmp_path):
    address, _ = served
    settings = {"tasks": [GUESS], "lengths": [64], "samples": 4, "mode": "key_tokens", "context_length": 8, "stride": 4}
    evaluate(str(model_dir), str(tmp_path / "local"), **settings)
    evaluate(address, str(tmp_path / "served"), tokenizer=str(model_dir), server=QUICK, **settings)
    local, remote = (read_answers(tmp_path / name / ANSWERS_FILE) for name in ("local", "served"))
    assert any(answer.response.is_answer for answer in local)
    for one, other in zip(local, remote, strict=True):
        assert other.response.is_answer == one.response.is_answer
        assert other.response.long == pytest.approx(one.response.long, abs=1e-5)
        assert other.response.short == pytest.approx(one.response.short, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_teacher_forced_tasks_on_a_server(dialect, backbone, model_dir, tmp_path):
    settings = {"tasks": [GUESS, SEVERAL], "lengths": [48], "samples": 4, "dtype": "float32"}
    with stub_server(dialect, backbone=backbone) as server:
        address = server.address
        served = {"tokenizer": str(model_dir), "server": QUICK}
        for name, model, options in (("local", str(model_dir), {}), ("served", address, served)):
            evaluate(model, str(tmp_path / name), mode="teacher_forced", **settings, **options)
        with pytest.raises(ValueError, match="set `mode` to 'teacher_forced'"):
            evaluate(address, str(tmp_path / "generate"), **settings, **served)
        with pytest.raises(ValueError, match="`--tokenizer`"):
            evaluate(address, str(tmp_path / "generate"), mode="teacher_forced", **settings)
        remote = RemoteScorer([address], QUICK)
        with pytest.raises(ValueError, match="cannot generate"):
            put_questions(remote, Prompter(load_tokenizer(str(model_dir))), [], "generate")
    found = [read_answers(tmp_path / name / ANSWERS_FILE) for name in ("local", "served")]
    local, remote = ({one.key: one for one in answers} for answers in found)
    assert next(iter(remote.values())).model.dtype == "served"
    assert len(local) == len(remote) == 8
    for key, one in local.items():
        other = replace(remote[key], seconds=one.seconds, answer_nll=one.answer_nll, other_nll=one.other_nll)
        other = replace(other, model=one.model)
        assert other == one, "the same likeliest tokens"
        assert remote[key].answer_nll == pytest.approx(one.answer_nll, abs=1e-4)
        assert remote[key].other_nll == pytest.approx(one.other_nll, abs=1e-3)
