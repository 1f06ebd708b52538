import hashlib
import json
import math
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from longppl.longppl import compute_longppl
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_modules.commands.cli.main import main
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring import evaluated_model as model_module
from lightning_modules.scoring import evaluator as evaluator_module
from lightning_modules.scoring.score import score, table
from lightning_modules.scoring.token_scores import TokenScores
from tests.conftest import make_text

SETTINGS = {"context_length": 48, "stride": 16, "alpha": 0.5, "beta": -6.0}
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def files(tmp_path):
    paths = []
    for number, words in enumerate((80, 110, 5)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(make_text(words, seed=number))
    return [str(path) for path in paths]


@pytest.mark.core
def test_agrees_with_the_authors_document_by_document(files, model_dir, evaluator_dir):
    result = score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    model, judge = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model_dir, evaluator_dir))
    tokenizer, judge_tokenizer = (AutoTokenizer.from_pretrained(path) for path in (model_dir, evaluator_dir))
    log_longppl = key_tokens = 0
    for document, file in zip(result["documents"][:2], files, strict=False):
        theirs = compute_longppl(
            Path(file).read_text(), model, judge, tokenizer, judge_tokenizer, None, 48, 16, alpha=0.5, beta=-6.0
        )
        assert document["file"] == file
        assert document["longppl"] == pytest.approx(float(theirs["longppl"]), rel=1e-5)
        assert document["perplexity"] == pytest.approx(float(theirs["ppl"]), rel=1e-5)
        assert (document["key_tokens"], document["tokens"]) == (theirs["n_key_token"], theirs["n_token"])
        log_longppl += theirs["n_key_token"] * math.log(theirs["longppl"])
        key_tokens += theirs["n_key_token"]
    assert result["longppl"] == pytest.approx(math.exp(log_longppl / key_tokens), rel=1e-5)
    assert result["key_tokens"] == key_tokens > 5
    assert result["tokens"] == sum(document["tokens"] for document in result["documents"])
    short = result["documents"][2]
    assert math.isnan(short["longppl"])
    assert math.isfinite(short["perplexity"])


def test_command_prints_a_table_and_writes_json(files, model_dir, evaluator_dir, tmp_path, capsys):
    output = tmp_path / "out.json"
    models = ["--model", str(model_dir), "--evaluator", str(evaluator_dir)]
    main(["score", *files, *models, *OPTIONS, "--output", str(output)])
    written = json.loads(output.read_text())
    found = {kind: Provenance(**own) for kind, own in written["provenance"].items()}
    assert found["model"].identity == model_identity(ModelConfig(str(model_dir)))
    assert found["model"][2:] == found["evaluator"][2:] == ("float32", "sdpa", "none")
    assert written["settings"]["key_token_rule"] == "paper"
    assert written["settings"]["evaluator"] == str(evaluator_dir)
    assert written["documents"][2]["longppl"] is None, "JSON has no NaN"
    assert f"{written['longppl']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_of_a_file_is_scored_like_a_text(kind, model_dir, evaluator_dir, tmp_path):
    texts = [make_text(80, seed=number) for number in range(3)]
    rows = [{"body": text} for text in texts]
    corpus = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), corpus)
    models = ["--model", str(model_dir), "--evaluator", str(evaluator_dir), *OPTIONS]
    output = tmp_path / "out.json"
    main(["score", str(corpus), "--row", "1", "--text_column", "body", *models, "--output", str(output)])
    (tmp_path / "1.txt").write_text(texts[1])
    expected = score(str(tmp_path / "1.txt"), str(model_dir), str(evaluator_dir), **SETTINGS)
    found = json.loads(output.read_text())
    assert found["documents"][0]["file"] == f"a.{kind}-1"
    for name in ("longppl", "perplexity", "key_tokens", "tokens", "settings"):
        assert found[name] == expected[name]


def test_revisions_are_those_of_model_and_evaluator(files, model_dir, evaluator_dir, tmp_path, monkeypatch):
    """A local folder has no revisions; here it is only seen where they arrive."""
    seen = set()

    def note(load):
        def noted(path, *args, revision=None, **options):
            seen.add((path, revision))
            return load(path, *args, revision=revision, **options)

        return noted

    for owner in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(owner, "from_pretrained", note(owner.from_pretrained))
    score(files[:1], str(model_dir), str(evaluator_dir), revision="a", evaluator_revision="b", **SETTINGS)
    assert seen == {(str(model_dir), "a"), (str(evaluator_dir), "b")}
    seen.clear()
    other = str(shutil.copytree(evaluator_dir, tmp_path / "other"))
    options = {"evaluator_tokenizer": other, "evaluator_revision": "b", **SETTINGS}
    score(files[:1], str(model_dir), str(evaluator_dir), **options)
    assert seen == {(str(model_dir), None), (str(evaluator_dir), "b"), (other, None)}


def test_all_models_read_the_text_of_the_evaluators_first_tokens_which_it_scores_once(
    model_dir, evaluator_dir, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text(make_text(300, seed=3))
    loaded, original = [], evaluator_module.load_scorer
    monkeypatch.setattr(evaluator_module, "load_scorer", lambda *args: loaded.append(args[0]) or original(*args))
    words = ["score", str(tmp_path / "a.txt"), "--model", str(model_dir), "--model", str(evaluator_dir)]
    words += ["--evaluator", str(evaluator_dir), "--max_tokens", "150", *OPTIONS, "--output", str(tmp_path / "results")]
    main(words)
    assert len(loaded) == 1
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "results").iterdir())]
    (text,) = {(each["characters"], each["documents"][0]["text_sha256"]) for each in results}
    cut = (tmp_path / "a.txt").read_text()[: text[0]]
    assert hashlib.sha256(cut.encode()).hexdigest() == text[1]
    evaluator = load_tokenizer(str(evaluator_dir)).backend_tokenizer
    assert len(evaluator.encode(cut).ids) == 150
    assert {each["settings"]["texts"] for each in results} == {results[0]["settings"]["texts"]}
    assert len({each["evaluator_key_tokens"] for each in results}) == len({each["key_bytes"] for each in results}) == 1


def test_bits_are_those_of_the_perplexities(files, model_dir, evaluator_dir):
    """By their definitions, of a model with other tokens than the evaluator and of the evaluator itself."""
    for model in (model_dir, evaluator_dir):
        result = score(files, str(model), str(evaluator_dir), **SETTINGS)
        scored, bits = result["tokens"] - len(files), math.log2(result["perplexity"])
        assert result["bits_per_byte"] == pytest.approx(bits * scored / result["bytes"], rel=1e-6)
        bits = result["key_bits_per_byte"] * result["key_bytes"]
        per_token = result["longppl_per_evaluator_token"]
        assert per_token == pytest.approx(2 ** (bits / result["evaluator_key_tokens"]), rel=1e-6)
        same = result["alignment"] == "tokens"
        assert same == (model is evaluator_dir)
        assert (result["key_bits_per_byte_error"] == 0) == same
        assert (per_token == pytest.approx(result["longppl"], rel=1e-6)) == same


def test_a_special_token_that_is_left_out_is_named(files, evaluator_dir, tmp_path, caplog):
    model = shutil.copytree(evaluator_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", tokenizer.convert_tokens_to_ids("</s>"))])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(model)
    for added in (True, False):
        assert "without the" not in caplog.text
        score(files[:1], str(model), str(evaluator_dir), add_special_tokens=added, **SETTINGS)
    assert f"'{model}' is scored without the '</s>' that its tokenizer puts before a text" in caplog.text


PI = {"method": "pi", "original_length": 128, "target_length": 512}


def test_a_context_extension_is_that_of_the_model_and_not_of_the_evaluator(files, model_dir, evaluator_dir, tmp_path):
    config = json.loads((shutil.copytree(model_dir, tmp_path / "pi") / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "rope_type": "linear", "factor": 4.0}
    (tmp_path / "pi" / "config.json").write_text(json.dumps(config))
    expected = score(files, str(tmp_path / "pi"), str(evaluator_dir), **SETTINGS)
    found = score(files, str(model_dir), str(evaluator_dir), context_extension=PI, **SETTINGS)
    plain = score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    for name in ("longppl", "perplexity"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
        assert found[name] != pytest.approx(plain[name], rel=1e-6)
    assert found["key_tokens"] == plain["key_tokens"]
    identity = found["provenance"]["model"]["identity"]
    assert identity == f"{plain['provenance']['model']['identity']} with pi(original_length=128, target_length=512)"
    assert found["provenance"]["evaluator"] == plain["provenance"]["evaluator"]


def test_methods_of_one_model_are_compared(files, model_dir, evaluator_dir, tmp_path, capsys):
    words = ["score", *files, "--model", str(model_dir), "--evaluator", str(evaluator_dir), *OPTIONS]
    for method in ("null", "{method: pi, original_length: 128, target_length: 512}"):
        words += ["--context_extension", method]
    main([*words, "--output", str(tmp_path / "results")])
    name = model_dir.name
    assert {path.stem for path in (tmp_path / "results").iterdir()} == {name, f"{name}-pi-512"}
    assert f"LongPPL / {name}'s" in capsys.readouterr().out
    assert "'kind'" in fails([*words, "--context_extension", "{kind: yarn}"], capsys)
    assert "must be a mapping such as {method: yarn" in fails([*words, "--context_extension", "yarn"], capsys)
    alone = ["inspect", files[0], "--evaluator", str(evaluator_dir), "--context_extension", "{method: pi}"]
    assert "is for the evaluated model" in fails(alone, capsys)


def test_files_without_text_are_skipped_and_named(files, model_dir, evaluator_dir, tmp_path, caplog):
    (tmp_path / "empty.txt").write_text(" \n")
    empty = str(tmp_path / "empty.txt")
    result = score([files[0], empty, files[1]], str(model_dir), str(evaluator_dir), **SETTINGS)
    assert result["skipped"] == [empty]
    assert f"Skipped, because they are empty or only white space: {empty}" in caplog.text
    assert {**result, "skipped": []} == score(files[:2], str(model_dir), str(evaluator_dir), **SETTINGS)
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(ValueError, match="All 2 files are empty or only white space"):
        score([empty, str(tmp_path / "other.txt")], str(model_dir), str(evaluator_dir), **SETTINGS)


def fails(arguments, capsys):
    """What `longce` prints when it refuses."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("max_tokens", [None, 90])
def test_evaluator_and_model_in_one_share_the_long_pass(files, model_dir, tmp_path, monkeypatch, max_tokens):
    passes = []
    original = Backbone.forward
    monkeypatch.setattr(
        Backbone,
        "forward",
        lambda self, batch, *a, **k: passes.append(batch["labels"].shape[1]) or original(self, batch, *a, **k),
    )

    def run(**options):
        passes.clear()
        cache = str(tmp_path / str(len(list(tmp_path.iterdir()))))
        return score(
            files[:2], str(model_dir), str(model_dir), cache_dir=cache, max_tokens=max_tokens, **SETTINGS, **options
        )

    apart = run()
    long_passes = sum(length > 64 for length in passes)
    shared = run(evaluator_add_special_tokens=False)
    assert sum(length > 64 for length in passes) == long_passes - 2
    monkeypatch.setattr(model_module, "describe_model", lambda *_, **__: Provenance("another model", "", "", ""))
    monkeypatch.setattr(model_module, "check_same_model", lambda *_: None)
    expected = run(evaluator_add_special_tokens=False)
    for name in ("longppl", "perplexity"):
        assert shared[name] == pytest.approx(expected[name], rel=1e-6)
        assert shared[name] != pytest.approx(apart[name], rel=1e-6) or name == "perplexity"
    assert shared["key_tokens"] == expected["key_tokens"] > 3


def test_key_tokens_only_gives_the_same_numbers_and_scores_fewer_tokens(files, model_dir, evaluator_dir, tmp_path):
    results, known = [], []
    for only in (False, True):
        options = {"cache_dir": str(tmp_path / str(only)), "key_tokens_only": only, **SETTINGS}
        results.append(score(files, str(model_dir), str(evaluator_dir), **options))
        stored = [TokenScores.load(path) for path in (tmp_path / str(only)).rglob("*.safetensors")]
        known.append(sum(int(scores.short.isfinite().sum()) for scores in stored))
    assert json.dumps(results[0]) == json.dumps(results[1])
    assert known[1] < known[0]


def test_several_models_are_compared_over_the_documents(model_dir, evaluator_dir, tmp_path, capsys):
    files = []
    for number in range(5):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(make_text(120, seed=number))
    other = shutil.copytree(model_dir, tmp_path / "other")
    network = AutoModelForCausalLM.from_pretrained(other)
    network.lm_head.weight.data *= 1.1
    network.save_pretrained(other)
    words = ["score", "--model", str(model_dir), "--model", str(other), *map(str, files)]
    words += ["--evaluator", str(evaluator_dir)]
    main([*words, *OPTIONS, "--output", str(tmp_path / "out")])
    text = capsys.readouterr().out
    results = [json.loads((tmp_path / "out" / f"{path.name}.json").read_text()) for path in (model_dir, other)]
    ratio = results[1]["perplexity"] / results[0]["perplexity"]
    rows = [line.split() for line in text.partition("Final numbers")[2].splitlines()]
    row = next(row for row in rows if "other" in row)
    assert f"{ratio:.3f}" in row
    # The same table as from the files; its interval is over documents.
    from lightning_modules.commands.compare.command import compare  # needs matplotlib, which the core does not

    assert compare([tmp_path / "out"]) in text
    assert f"{ratio:.3f} [" in text
    (other / "model.safetensors").unlink()
    with pytest.raises(SystemExit):  # before the first model scores anything
        main([*words, *OPTIONS, "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_the_table_fits_the_terminal(files, model_dir, evaluator_dir, monkeypatch):
    result = score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    monkeypatch.setenv("COLUMNS", "80")
    lines = table(result).splitlines()
    assert max(map(len, lines)) <= 80
    ends = [line.split()[0][-5:] for line in lines if ".txt" in line]
    assert ends == ["0.txt", "1.txt", "2.txt"]
