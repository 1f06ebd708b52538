import hashlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from longppl.longppl import compute_longppl
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring import scored_model as scored_model_module
from lightning_modules.scoring.long_context_scorer import LongContextScorer
from lightning_modules.scoring.records import read_records, summarize
from lightning_modules.scoring.score import score, table
from lightning_modules.scoring.token_scores import TokenScores
from longce.cli.main import main
from tests.conftest import make_text
from tests.support import reference

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
    records = score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    model, judge = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model_dir, evaluator_dir))
    tokenizer, judge_tokenizer = (AutoTokenizer.from_pretrained(path) for path in (model_dir, evaluator_dir))
    log_longppl = key_tokens = 0
    for record, file in zip(records[:2], files, strict=False):
        theirs = compute_longppl(
            Path(file).read_text(), model, judge, tokenizer, judge_tokenizer, None, 48, 16, alpha=0.5, beta=-6.0
        )
        own = record.sums
        assert record.document == file
        assert own.longppl == pytest.approx(float(theirs["longppl"]), rel=1e-5)
        assert own.perplexity == pytest.approx(float(theirs["ppl"]), rel=1e-5)
        assert (own.key_tokens, own.tokens + own.unscored) == (theirs["n_key_token"], theirs["n_token"])
        log_longppl += theirs["n_key_token"] * math.log(theirs["longppl"])
        key_tokens += theirs["n_key_token"]
    total = summarize(records)
    assert total.longppl == pytest.approx(math.exp(log_longppl / key_tokens), rel=1e-5)
    assert total.key_tokens == key_tokens > 5
    short = records[2].sums
    assert math.isnan(short.longppl)
    assert math.isfinite(short.perplexity)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_compiled_layers_score_the_same_and_are_a_part_of_what_identifies_the_scores(files, model_dir, tmp_path):
    models = {"model": str(model_dir), "evaluator": str(model_dir), "dtype": "float32", "cache_dir": str(tmp_path)}
    plain, compiled = (score(files, **models, **SETTINGS, compile=each) for each in (False, True))
    assert [record.sums.key_tokens for record in compiled] == [record.sums.key_tokens for record in plain]
    for found, expected in zip(compiled, plain, strict=True):
        assert found.sums.perplexity == pytest.approx(expected.sums.perplexity, rel=1e-5)
        assert found.sums.longppl == pytest.approx(expected.sums.longppl, rel=1e-5, nan_ok=True)
        assert found.model.attention == f"{expected.model.attention}, compiled layers"
    assert compiled[0].sums != plain[0].sums, "nothing was compiled, or scores of other layers were read"
    # A corpus, in inference mode: each document and both in one batch.
    options = {"dtype": "float32", "device": "cpu", "context_length": 48, "stride": 16}
    texts = [Path(file).read_text() for file in files]
    expected = LongContextScorer(str(model_dir), **options).score(texts)
    for batch_tokens in (None, 1000):
        found = LongContextScorer(str(model_dir), **options, batch_tokens=batch_tokens, compile=True).score(texts)
        assert found["perplexity"].to_pylist() == pytest.approx(expected["perplexity"].to_pylist(), rel=1e-5)


def test_command_prints_a_table_and_writes_records(files, model_dir, evaluator_dir, tmp_path, capsys):
    output = tmp_path / "out.parquet"
    models = ["--model", str(model_dir), "--evaluator", str(evaluator_dir)]
    main(["score", *files, *models, *OPTIONS, "--output", str(output)])
    records = read_records(output)
    assert records == score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    first = records[0]
    assert first.model.identity == model_identity(ModelConfig(str(model_dir)))
    assert first.model[3:] == ("float32", "sdpa", "none", False)
    assert first.evaluator[3:] == ("float32", "sdpa", "none", True)
    assert (first.definition.key_token_rule, first.evaluator.name) == ("paper", str(evaluator_dir))
    assert math.isnan(records[2].sums.longppl)
    assert f"{summarize(records).longppl:.4f}" in capsys.readouterr().out
    assert "must end in .parquet" in fails(["score", *files, *models, "--output", "out.json"], capsys)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_a_file_are_scored_like_texts(kind, model_dir, evaluator_dir, tmp_path, caplog):
    texts = [make_text(80, seed=number) for number in range(3)]
    rows = [{"body": text} for text in (*texts, " ")]
    corpus = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), corpus)
    models = ["--model", str(model_dir), "--evaluator", str(evaluator_dir), *OPTIONS]
    output = tmp_path / "out.parquet"
    main(["score", str(corpus), "--row", "1", "--text_column", "body", *models, "--output", str(output)])
    (tmp_path / "1.txt").write_text(texts[1])
    (expected,) = score(str(tmp_path / "1.txt"), str(model_dir), str(evaluator_dir), **SETTINGS)
    assert read_records(output) == [expected._replace(document=f"a.{kind}-1")]
    words = ["score", str(corpus), str(tmp_path / "1.txt"), "--text_column", "body"]
    main([*words, *models, "--output", str(output)])
    named = {f"a.{kind}-{number}": text for number, text in enumerate(texts)} | {str(tmp_path / "1.txt"): texts[1]}
    assert read_records(output) == score(named, str(model_dir), str(evaluator_dir), **SETTINGS)
    assert f"Skipped 1 documents that are empty or only white space: a.{kind}-3" in caplog.text


@pytest.mark.parametrize(
    ("lines", "more", "named"),
    [
        (['{"text": "a"}', "{broken"], [], "Row 1 of .*malformed JSON"),
        (["[", '{"text": "a"}', "]"], [], "Row 0 of .*a.jsonl' cannot be scored: malformed JSON .* `jq -c .*`"),
        (['[{"text": "a"}]'], [], "Row 0 of .*expected a JSON object, got list.* `jq -c .*`"),
        (['{"text":', '"a"}'], [], "Row 0 of .*malformed JSON .* `jq -c .*`"),
        (['{"body": "a"}'], [], "Row 0 of .*'text'.*'body'"),
        (['{"text": " "}'], [], "only white space"),
        (['{"text": "a"}'], ["a.jsonl"], "given twice"),
        (['{"text": "a"}'], ["none.jsonl"], "none.jsonl"),
    ],
)
def test_rows_that_cannot_be_scored_are_named(lines, more, named, model_dir, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / name) for name in ("a.jsonl", *more)]
    message = fails(["score", *files, "--model", str(model_dir), "--evaluator", str(model_dir)], capsys)
    assert re.search(named, message)


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
    loaded, original = [], scored_model_module.load_scorer
    monkeypatch.setattr(scored_model_module, "load_scorer", lambda *args: loaded.append(args[0]) or original(*args))
    words = ["score", str(tmp_path / "a.txt"), "--model", str(model_dir), "--model", str(evaluator_dir)]
    words += ["--evaluator", str(evaluator_dir), "--max_tokens", "150", *OPTIONS]
    main([*words, "--output", str(tmp_path / "out.parquet")])
    names = [each.pretrained_model_name_or_path for each in loaded]
    assert names == [str(evaluator_dir), str(model_dir)]  # whose pass is also that of the evaluator as a model
    records = read_records(tmp_path / "out.parquet")
    assert len(records) == 2
    (text,) = {(each.sums.characters, each.text_sha256) for each in records}
    cut = (tmp_path / "a.txt").read_text()[: text[0]]
    assert hashlib.sha256(cut.encode()).hexdigest() == text[1]
    evaluator = load_tokenizer(str(evaluator_dir)).backend_tokenizer
    assert len(evaluator.encode(cut).ids) == 150
    assert len({(each.sums.evaluator_key_tokens, each.sums.key_bytes) for each in records}) == 1


def test_bits_are_those_of_the_perplexities(files, model_dir, evaluator_dir):
    """By their definitions, of a model with other tokens than the evaluator and of the evaluator itself."""
    for model in (model_dir, evaluator_dir):
        records = score(files, str(model), str(evaluator_dir), **SETTINGS)
        total = summarize(records)
        bits = math.log2(total.perplexity)
        assert total.bits_per_byte == pytest.approx(bits * total.tokens / total.bytes, rel=1e-6)
        bits = total.key_bits_per_byte * total.key_bytes
        per_token = total.longppl_per_evaluator_token
        assert per_token == pytest.approx(2 ** (bits / total.evaluator_key_tokens), rel=1e-6)
        same = {record.alignment for record in records} == {"tokens"}
        assert same == (model is evaluator_dir)
        assert (total.key_bits_per_byte_error == 0) == same
        assert (per_token == pytest.approx(total.longppl, rel=1e-6)) == same


def test_soft_longppl_and_longppl_without_lcl_are_plain_sums_over_characters(
    files, model_dir, evaluator_dir, tmp_path, capsys
):
    """The ablations of the paper's Table 1 and Figure 9, in float64 from full logits, across two tokenizers."""
    options = [*OPTIONS, "--beta", "-inf", "--output", str(tmp_path / "out.parquet")]
    main(["score", *files, "--model", str(model_dir), "--evaluator", str(evaluator_dir), *options])
    model, judge = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model_dir, evaluator_dir))
    sums = {"soft_nll": 0.0, "soft_weight": 0.0, "key_nll": 0.0, "key_tokens": 0}
    for file in files:
        text = Path(file).read_text()
        read, judged = (load_tokenizer(str(path)).backend_tokenizer for path in (model_dir, evaluator_dir))
        read, judged = read.encode(text, add_special_tokens=False), judged.encode(text)
        with torch.no_grad():
            own = reference.document_log_likelihood(model, torch.tensor(read.ids)).tolist()
            pair = reference.long_and_short(judge, torch.tensor(judged.ids), 48, 16)
        # The evaluator's long-short difference at each character.
        lsd = [math.nan] * len(text)
        for (start, end), long, short in zip(judged.offsets, *(values.tolist() for values in pair), strict=True):
            lsd[start:end] = [long - short] * (end - start)
        for (start, end), log_likelihood in zip(read.offsets[1:], own[1:], strict=True):
            weights = [min(math.exp(each), 5.0) for each in lsd[start:end]]  # Equation 7
            weight = sum(weights) / len(weights)  # Equation 10
            key = all(each > 0.5 for each in lsd[start:end])  # Equation 4 without LCL, Equation 9
            sums["soft_nll"] -= weight * log_likelihood
            sums["soft_weight"] += weight
            sums["key_nll"] -= key * log_likelihood
            sums["key_tokens"] += key
    total = summarize(read_records(tmp_path / "out.parquet"))
    with_lcl = summarize(score(files, str(model_dir), str(evaluator_dir), **SETTINGS))
    assert total.key_tokens == sums["key_tokens"] > with_lcl.key_tokens
    assert total.longppl == pytest.approx(math.exp(sums["key_nll"] / sums["key_tokens"]), rel=1e-5)
    assert total.longppl_soft == pytest.approx(math.exp(sums["soft_nll"] / sums["soft_weight"]), rel=1e-5)
    printed = " ".join(capsys.readouterr().out.split())  # lines are broken
    assert f"soft influence: {total.longppl_soft:.4f}." in printed


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
    numbers = [summarize(records).numbers() for records in (found, expected, plain)]
    for name in ("longppl", "perplexity"):
        of_found, of_expected, of_plain = (each[name] for each in numbers)
        assert of_found == pytest.approx(of_expected, rel=1e-6)
        assert of_found != pytest.approx(of_plain, rel=1e-6)
    assert numbers[0]["key_tokens"] == numbers[2]["key_tokens"]
    identity = found[0].model.identity
    assert identity == f"{plain[0].model.identity} with pi(original_length=128, target_length=512)"
    assert found[0].evaluator == plain[0].evaluator


def test_an_extended_model_has_a_long_pass_of_its_own_beside_itself_as_the_evaluator(files, model_dir):
    """Otherwise the evaluator's, which is not extended, would be taken for that of the model."""
    options = {"evaluator_add_special_tokens": False, **SETTINGS}
    plain = score(files, str(model_dir), str(model_dir), **options)
    extended = score(files, str(model_dir), str(model_dir), context_extension=PI, **options)
    assert summarize(extended).key_tokens == summarize(plain).key_tokens > 3
    for name in ("longppl", "perplexity"):
        assert getattr(summarize(extended), name) != pytest.approx(getattr(summarize(plain), name), rel=1e-6)


def test_methods_of_one_model_are_compared(files, model_dir, evaluator_dir, tmp_path, capsys):
    words = ["score", *files, "--model", str(model_dir), "--evaluator", str(evaluator_dir), *OPTIONS]
    for method in ("null", "{method: pi, original_length: 128, target_length: 512}"):
        words += ["--context_extension", method]
    main([*words, "--output", str(tmp_path / "out.parquet")])
    name = model_dir.name
    names = list(summarize(read_records(tmp_path / "out.parquet"), by="model.name"))
    assert names == [str(model_dir), f"{model_dir}-pi-512"]
    assert f"LongPPL / {name}'s" in capsys.readouterr().out
    assert "'kind'" in fails([*words, "--context_extension", "{kind: yarn}"], capsys)
    assert "must be a mapping such as {method: yarn" in fails([*words, "--context_extension", "yarn"], capsys)
    alone = ["inspect", files[0], "--evaluator", str(evaluator_dir), "--context_extension", "{method: pi}"]
    assert "is for the evaluated model" in fails(alone, capsys)


def test_files_without_text_are_skipped_and_named(files, model_dir, evaluator_dir, tmp_path, caplog):
    (tmp_path / "empty.txt").write_text(" \n")
    empty = str(tmp_path / "empty.txt")
    records = score([files[0], empty, files[1]], str(model_dir), str(evaluator_dir), **SETTINGS)
    assert f"Skipped, because they are empty or only white space: {empty}" in caplog.text
    assert records == score(files[:2], str(model_dir), str(evaluator_dir), **SETTINGS)
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
    numbers = itertools.count()
    monkeypatch.setattr(scored_model_module, "model_identity", lambda _: f"another model each time: {next(numbers)}")
    monkeypatch.setattr(scored_model_module, "check_same_model", lambda *_: None)
    expected = run(evaluator_add_special_tokens=False)
    of_shared, of_expected, of_apart = (summarize(records) for records in (shared, expected, apart))
    assert of_shared.longppl == pytest.approx(of_expected.longppl, rel=1e-6)
    assert of_shared.longppl != pytest.approx(of_apart.longppl, rel=1e-6)
    assert of_shared.perplexity == pytest.approx(of_expected.perplexity, rel=1e-6)
    assert of_shared.key_tokens == of_expected.key_tokens > 3


def test_key_tokens_only_gives_the_same_numbers_and_scores_fewer_tokens(files, model_dir, evaluator_dir, tmp_path):
    results, known = [], []
    for only in (False, True):
        options = {"cache_dir": str(tmp_path / str(only)), "key_tokens_only": only, **SETTINGS}
        results.append(score(files, str(model_dir), str(evaluator_dir), **options))
        stored = [TokenScores.load(path) for path in (tmp_path / str(only)).rglob("*.safetensors")]
        known.append(sum(int(scores.short.isfinite().sum()) for scores in stored))
    unknown = {"soft_weight": 0.0, "soft_nll": 0.0}
    assert results[1] == [record._replace(sums=record.sums._replace(**unknown)) for record in results[0]]
    assert known[1] < known[0]
    # An earlier run has complete scores of one document: soft LongPPL of it alone would pass for that of all.
    options = {"cache_dir": str(tmp_path / "some"), **SETTINGS}
    score(files[:1], str(model_dir), str(evaluator_dir), **options)
    assert score(files, str(model_dir), str(evaluator_dir), key_tokens_only=True, **options) == results[1]


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
    main([*words, *OPTIONS, "--output", str(tmp_path / "out.parquet")])
    text = capsys.readouterr().out
    first, second = summarize(read_records(tmp_path / "out.parquet"), by="model.name").values()
    ratio = second.perplexity / first.perplexity
    rows = [line.split() for line in text.partition("Final numbers")[2].splitlines()]
    row = next(row for row in rows if "other" in row)
    assert f"{ratio:.3f}" in row
    # The same table as from the file; its interval is over documents.
    from longce.compare.command import compare  # needs matplotlib, which the core does not

    assert compare([tmp_path / "out.parquet"]) in text
    assert f"{ratio:.3f} [" in text
    (other / "model.safetensors").unlink()
    with pytest.raises(SystemExit):  # before the first model scores anything
        main([*words, *OPTIONS, "--output", str(tmp_path / "new.parquet")])
    assert not (tmp_path / "new.parquet").exists()


def test_the_table_fits_the_terminal(files, model_dir, evaluator_dir, monkeypatch):
    result = score(files, str(model_dir), str(evaluator_dir), **SETTINGS)
    monkeypatch.setenv("COLUMNS", "80")
    lines = table(result).splitlines()
    assert max(map(len, lines)) <= 80
    ends = [line.split()[0][-5:] for line in lines if ".txt" in line]
    assert ends == ["0.txt", "1.txt", "2.txt"]
