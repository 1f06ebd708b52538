"""LongPPL as a task of lm-evaluation-harness equals that of `longce score`, and what it refuses."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.scoring.records import summarize
from longce import score
from tests.conftest import byte_level_tokenizer, tiny_model
from tests.support.pages import ROOT
from tests.support.texts import text_of

RECIPE = ROOT / "docs" / "recipes" / "lm_eval"
THRESHOLDS = {"alpha": 0.3, "beta": -8.0}
SIZES = {"context_length": 16, "stride": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts whose letters are often in several tokens, and two models with different tokenizers that add a token."""
    folder = tmp_path_factory.mktemp("harness")
    texts = [text_of("mixed", 120, seed=seed) for seed in range(3)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    for seed, name in enumerate(("model", "other")):
        tokenizer = byte_level_tokenizer([text[seed::2] for text in texts])
        tokenizer.save_pretrained(folder / name)
        tiny_model("llama", len(tokenizer), seed=seed + 1).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def score_texts(folder):
    """A function that scores the texts with an evaluator, and returns its folder of key tokens and the sums."""

    def score_texts(evaluator, **options):
        cache = folder / f"key tokens by {evaluator} {options}"
        files = [str(folder / f"{number}.txt") for number in range(3)]
        options |= {**THRESHOLDS, **SIZES, "cache_dir": str(cache)}
        return cache, summarize(score(files, str(folder / "model"), str(folder / evaluator), **options))

    return score_texts


def describe(folder, key_tokens, **options):
    return {"texts": str(folder / "*.txt"), "key_tokens": str(key_tokens), **THRESHOLDS, **options}


def evaluate(metadata, backend="hf", **model_args):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    metadata = {**model_args, **metadata}
    manager = TaskManager(include_path=str(RECIPE), include_defaults=False, metadata=metadata)
    device = {"device": "cpu"} if backend == "hf" else {}
    return simple_evaluate(backend, model_args, tasks=["longppl"], task_manager=manager, **device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluator", "options"),
    [("model", {}), ("other", {}), ("other", {"max_tokens": 200}), ("other", {"add_special_tokens": True})],
    ids=["same tokenizer", "other tokenizer", "cut texts", "special tokens"],
)
def test_longppl_equals_that_of_the_command(folder, score_texts, evaluator, options):
    key_tokens, expected = score_texts(evaluator, **options)
    cut_texts = options.pop("max_tokens", None) is not None
    metadata = describe(folder, key_tokens, cut_texts=cut_texts, **options)
    found = evaluate(metadata, pretrained=str(folder / "model"))
    assert found["results"]["longppl"]["longppl,none"] == pytest.approx(expected.longppl, rel=1e-6)
    documents = [sample["longppl"] for sample in found["samples"]["longppl"]]
    assert sum(key_tokens for _, key_tokens in documents) == expected.key_tokens > 100
    assert -sum(log_likelihood for log_likelihood, _ in documents) == pytest.approx(expected.key_nll, rel=1e-6)
    assert expected.longppl != pytest.approx(expected.perplexity, rel=0.01)


@pytest.mark.slow
def test_the_command_of_the_harness(folder, score_texts, tmp_path, monkeypatch):
    from lm_eval.__main__ import cli_evaluate

    key_tokens, expected = score_texts("other")
    words = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={folder / 'model'}", "--device", "cpu"]
    words += ["--tasks", "longppl", "--include_path", str(RECIPE), "--batch_size", "4", "--log_samples"]
    words += ["--metadata", json.dumps(describe(folder, key_tokens)), "--output_path", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    cli_evaluate()
    (file,) = tmp_path.glob("**/results_*.json")
    found = json.loads(file.read_text())["results"]["longppl"]
    assert found["longppl,none"] == pytest.approx(expected.longppl, rel=1e-6)


class Completions(BaseHTTPRequestHandler):
    """The completions of a server such as vLLM, with the log-likelihoods of prompts of token ids."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = [self.complete(index, ids) for index, ids in enumerate(request["prompt"])]
        content = json.dumps({"choices": choices}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def complete(self, index, ids):
        with torch.no_grad():
            logits = self.server.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        values = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        # The last one is that of the token that the server generates.
        tops = [None, *({"a": value} for value in values), {"a": -1.0}]
        return {"index": index, "logprobs": {"token_logprobs": [None, *values, -1.0], "top_logprobs": tops}}

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_longppl_of_a_server(folder, score_texts):
    pytest.importorskip("tenacity")
    key_tokens, expected = score_texts("other")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    server.model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    arguments = {"model": "served", "base_url": f"http://127.0.0.1:{server.server_port}/v1/completions"}
    arguments |= {"tokenizer": str(folder / "model"), "tokenizer_backend": "huggingface"}
    try:
        found = evaluate(describe(folder, key_tokens), "local-completions", **arguments)
    finally:
        server.shutdown()
        server.server_close()
    assert found["results"]["longppl"]["longppl,none"] == pytest.approx(expected.longppl, rel=1e-6)


@pytest.mark.slow
def test_what_is_refused(folder, score_texts, tmp_path):
    from longce.harness_task import read_documents

    key_tokens, _ = score_texts("other")
    metadata = describe(folder, key_tokens, pretrained=str(folder / "model"))

    def refuses(message, **changed):
        with pytest.raises(ValueError, match=message):
            read_documents(**{**metadata, **changed})

    refuses("--metadata", key_tokens="")
    refuses("longce score FILES", key_tokens=str(tmp_path))
    (tmp_path / "changed.txt").write_text((folder / "0.txt").read_text() + ".")
    refuses("other texts, but not of '.*changed.txt'.*cut_texts", texts=str(tmp_path / "changed.txt"))
    refuses("None of the 3 texts", alpha=90.0)
    refuses("tokenizer of the model", pretrained="")
    documents = read_documents(**metadata)["test"]
    longest = max(document["runs"][-1][1] for document in documents)
    assert len(read_documents(**metadata, max_length=longest + 1)["test"]) == len(documents)
    refuses(f"token {longest} of .* model is {longest}: .*max_length", max_length=longest)
    served = {"base_url": "http://127.0.0.1", "tokenizer": str(folder / "model")}
    text = " ".join((folder / f"{number}.txt").read_text() for number in (0, 1, 2, 0, 1, 2))
    (tmp_path / "long.txt").write_text(text)
    options = {**THRESHOLDS, **SIZES, "cache_dir": str(tmp_path / "long")}
    score(str(tmp_path / "long.txt"), str(folder / "model"), str(folder / "other"), **options)
    refuses("model is 2,048:", texts=str(tmp_path / "long.txt"), key_tokens=str(tmp_path / "long"), **served)


@pytest.mark.slow
def test_requests_of_earlier_documents_are_not_used():
    from longce.harness_task import LongPPLTask

    with pytest.raises(ValueError, match="--cache_requests"):
        LongPPLTask.build_all_requests(None, cache_requests=True)


def test_two_evaluators_in_a_folder_are_refused(folder, tmp_path):
    from longce.harness_task import read_documents

    for evaluator in ("model", "other"):
        options = {**THRESHOLDS, **SIZES, "cache_dir": str(tmp_path)}
        score(str(folder / "0.txt"), str(folder / "model"), str(folder / evaluator), **options)
    metadata = describe(folder, tmp_path, pretrained=str(folder / "model"), texts=str(folder / "0.txt"))
    with pytest.raises(ValueError, match="2 evaluators or settings"):
        read_documents(**metadata)


def test_the_page_shows_the_file():
    assert (RECIPE / "longppl.yaml").read_text() in (ROOT / "docs" / "evaluate.md").read_text()
