"""The same question asked by two commands gets the same answer."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from longppl.longppl import compute_longppl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import longce
from callbacks import ExternalEvaluator
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.key_tokens import document_tokens, find_key_tokens
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.utilities.statistics import corpus_mean
from lightning_modules.visualization.page import inspect_document
from longce.cli.main import main
from longce.compare.runs import read_runs
from tests.conftest import make_text, tiny_model
from tests.support.experiments import evaluator, experiment, tensorboard, text_data
from tests.support.texts import LANGUAGES, TOKENIZERS, text_of
from tests.support.trainers import quiet_trainer

THRESHOLDS = {"alpha": 0.5, "beta": -6.0}
WINDOWS = {"context_length": 24, "stride": 8}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*are unknown to the tokenizer", "ignore:.*have no key token", "ignore:.*share a character"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same models with one tokenizer that trims its offsets, the same one that does not, and another one."""
    found = {}
    for name in ("byte_level_trimmed", "byte_level", "byte_fallback"):
        folder = found[name] = tmp_path_factory.mktemp(name)
        tiny_model("gpt_neox", 600, seed=5).save_pretrained(folder)
        TOKENIZERS[name]().save_pretrained(folder)
    return {name: str(folder) for name, folder in found.items()}


def scored(path, text, model, evaluator):
    path.write_text(text, encoding="utf-8")
    (record,) = score(str(path), model, evaluator, evaluator_add_special_tokens=False, **WINDOWS, **THRESHOLDS)
    return record.sums.numbers(), record.alignment


def validated(document, model, evaluator):
    """What validation logs, and the mask of the callback."""
    callback = ExternalEvaluator(evaluator, add_special_tokens=False, **WINDOWS, **THRESHOLDS)
    loader = DataLoader([document], batch_size=None)
    (logged,) = quiet_trainer(None, callback).validate(LongContextLM(model, **WINDOWS), loader, verbose=False)
    return logged, callback.key_tokens(document, 0, torch.device("cpu")).mask


def predicted(document, model):
    module = LongContextLM(model, **WINDOWS)
    module.configure_model()
    with torch.no_grad():
        (scores,) = module.eval().predict_step(document, 0)
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_score_validate_predict_and_inspect_with_the_model_as_its_own_evaluator(language, folders, tmp_path):
    text = text_of(language, words=30)
    answers = []
    for name in ("byte_level_trimmed", "byte_level"):
        model = folders[name]
        document = encode_document(text, load_tokenizer(model), name="document")
        by_score, alignment = scored(tmp_path / "document.txt", text, model, model)
        logged, mask = validated(document, model, model)
        scores = predicted(document, model)
        page = inspect_document(
            text, model, model=model, alternatives=0, evaluator_add_special_tokens=False, **WINDOWS, **THRESHOLDS
        )

        key = find_key_tokens(scores, **THRESHOLDS).mask
        assert torch.equal(mask, key)
        assert torch.equal(page.models[0].key, key)
        assert alignment == "tokens"
        assert by_score["key_tokens"] == logged["val/key_tokens"] == int(key.sum()) > 3
        longppl = float(torch.exp(-scores.long[key].double().mean()))
        assert by_score["longppl"] == pytest.approx(longppl, rel=1e-6)
        assert logged["val/longppl"] == pytest.approx(longppl, rel=1e-6)
        assert page.models[0].perplexities()[0] == pytest.approx(longppl, rel=1e-6)
        answers.append((int(key.sum()), longppl))
    assert answers[0] == answers[1], "trimmed offsets or not"


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=() if name == "mixed" else pytest.mark.slow) for name in LANGUAGES]
)
@pytest.mark.parametrize("model", ["byte_level_trimmed", "byte_fallback"])
def test_score_validate_and_inspect_with_another_tokenizer(model, language, folders, tmp_path):
    text = text_of(language, words=30)
    path, other = folders[model], folders["byte_fallback" if model == "byte_level_trimmed" else "byte_level_trimmed"]
    document = encode_document(text, load_tokenizer(path), name="document")
    by_score, alignment = scored(tmp_path / "document.txt", text, path, other)
    logged, mask = validated(document, path, other)
    page = inspect_document(
        text, other, model=path, alternatives=0, evaluator_add_special_tokens=False, **WINDOWS, **THRESHOLDS
    )
    assert alignment == "characters"
    assert logged["val/documents_aligned_by_characters"] == 1
    assert by_score["key_tokens"] == logged["val/key_tokens"] == int(mask.sum())
    assert torch.equal(page.models[0].key, mask)
    for name in ("tokens_sharing_characters", "tokens_without_characters"):
        assert logged[f"val/{name}"] == pytest.approx(by_score[name])
    if language not in ("english", "latex"):
        assert by_score["tokens_sharing_characters"] > 0
    if mask.any():
        assert logged["val/longppl"] == pytest.approx(by_score["longppl"], rel=1e-6)
        assert page.models[0].perplexities()[0] == pytest.approx(by_score["longppl"], rel=1e-6)


def count_number(number, text):
    """How often a number is printed, to at least three digits."""
    found = [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\.?\d*", text)]
    return sum(value == pytest.approx(number, rel=5e-4) for value in found)


def test_score_the_callback_validate_compare_and_python_give_one_number(
    model_dir, evaluator_dir, tmp_path, monkeypatch, capsys
):
    """LongPPL, also soft, and perplexity of three documents: printed, logged, recorded, compared and returned."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(3):
        Path(f"texts/{number}.txt").write_text(make_text(40 + 20 * number, seed=number))
    texts = sorted(map(str, Path("texts").iterdir()))
    about = {**WINDOWS, **THRESHOLDS, "evaluator_add_special_tokens": False}
    records = longce.score(texts, str(model_dir), str(evaluator_dir), **about)
    total = longce.summarize(records)
    assert total.key_tokens > 9
    number, perplexity, soft = total.longppl, total.perplexity, total.longppl_soft

    options = [f"--{name}={value}" for name, value in about.items()]
    main(["score", *texts, f"--model={model_dir}", f"--evaluator={evaluator_dir}", *options, "--output=s.parquet"])
    printed = capsys.readouterr().out
    assert all(count_number(each, printed) > 0 for each in (number, perplexity, soft))
    assert longce.read_records("s.parquet") == records

    judge = evaluator(evaluator_dir, **WINDOWS, **THRESHOLDS, add_special_tokens=False)
    data = text_data(model_dir, "texts", sequence_length=512)
    config = experiment(model_dir, data, callbacks=[judge], logger=tensorboard(name="longce", version="v"))
    Path("run.yaml").write_text(yaml.safe_dump({**config, "seed_everything": 1}))
    main(["validate", "-c", "run.yaml"])
    printed = capsys.readouterr()
    (file,) = Path("runs").rglob("documents/*.parquet")
    by_callback = longce.summarize(longce.read_records(file))
    assert by_callback.longppl == pytest.approx(number, rel=1e-6)
    assert by_callback.key_tokens == total.key_tokens
    assert count_number(number, printed.out + printed.err) > 0
    events = EventAccumulator(str(file.parents[1])).Reload()
    logged = {"longppl": number, "longppl_soft": soft, "perplexity": perplexity, "key_tokens": total.key_tokens}
    for name, value in logged.items():
        assert events.Scalars(f"val/{name}")[-1].value == pytest.approx(value, rel=1e-6)

    for run in (*read_runs(["s.parquet"]), *read_runs([file])):
        ((_, steps),) = run.evaluations.items()
        assert corpus_mean(steps[0], "longppl") == pytest.approx(number, rel=1e-6)
        assert corpus_mean(steps[0], "perplexity") == pytest.approx(perplexity, rel=1e-6)
        assert corpus_mean(steps[0], "longppl_soft") == pytest.approx(soft, rel=1e-6)
    main(["compare", "s.parquet", str(file)])
    compared = capsys.readouterr().out
    assert count_number(number, compared) == count_number(soft, compared) == 2


def test_the_rule_of_the_authors_in_score_and_validation(folders, tmp_path, caplog):
    """Offsets come as they are stored: white space is key with trimmed offsets where its place is in a span."""
    text, model = text_of("cjk", words=30), folders["byte_level_trimmed"]
    (tmp_path / "document.txt").write_text(text, encoding="utf-8")
    rule = {"key_token_rule": "authors", **WINDOWS, **THRESHOLDS}
    (by_score,) = score(str(tmp_path / "document.txt"), model, folders["byte_fallback"], **rule)
    assert "share a character" in caplog.text
    callback = ExternalEvaluator(folders["byte_fallback"], **rule)
    data = type("Data", (), {"tokenizer_name": model, "tokenizer_revision": None})
    callback.setup(type("Trainer", (), {"datamodule": data, "callbacks": [callback]}), None, "validate")
    document = encode_document(text, load_tokenizer(model))
    found = callback.key_tokens(document, 0, torch.device("cpu"))
    assert by_score.alignment == found.alignment == "authors"
    assert int(found.mask.sum()) == by_score.sums.key_tokens
    (paper,) = score(
        str(tmp_path / "document.txt"), model, folders["byte_fallback"], **{**rule, "key_token_rule": "paper"}
    )
    assert paper.sums.key_tokens != by_score.sums.key_tokens
    with pytest.raises(ValueError, match="needs a data module with a `tokenizer_name`"):
        callback.setup(type("Trainer", (), {"datamodule": None, "callbacks": [callback]}), None, "validate")
    with pytest.raises(ValueError, match="tokens are not those of the data module"):
        callback.key_tokens({**document, "input_ids": document["input_ids"] + 1}, 0, torch.device("cpu"))


class Documents(LightningDataModule):
    """One document, as the data modules read it."""

    def __init__(self, text, model, *, add_special_tokens):
        super().__init__()
        self.tokenizer_name, self.tokenizer_revision = model, None
        self.document = encode_document(text, load_tokenizer(model), name="d", add_special_tokens=add_special_tokens)

    def val_dataloader(self):
        return DataLoader([self.document], batch_size=None)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("precomputed", [False, True])
def test_validation_by_the_rule_of_the_authors_equals_their_raw_output(special, precomputed, folders, tmp_path):
    """Trimmed offsets on both sides, tokens that share characters, and special tokens in the data."""
    text, evaluator, model = text_of("mixed", words=40, seed=3), folders["byte_fallback"], folders["byte_level_trimmed"]
    if not precomputed:
        evaluator, model = model, evaluator
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (model, evaluator)]
    tokenizers = [AutoTokenizer.from_pretrained(name) for name in (model, evaluator)]
    (tmp_path / "spans").mkdir()
    spans = str(tmp_path / "spans" / "d.txt")
    theirs = compute_longppl(text, *models, *tokenizers, spans, 24, 8, *THRESHOLDS.values())

    source = {"key_spans": str(tmp_path / "spans")} if precomputed else {"evaluator": evaluator}
    callback = ExternalEvaluator(**source, key_token_rule="authors", **WINDOWS, **THRESHOLDS)
    trainer = quiet_trainer(None, callback)
    data = Documents(text, model, add_special_tokens=special)
    with pytest.warns(UserWarning, match="key tokens were transferred as character spans"):
        (logged,) = trainer.validate(LongContextLM(model, **WINDOWS), data, verbose=False)

    assert logged["val/key_tokens"] == theirs["n_key_token"] > 3
    assert logged["val/documents_aligned_by_characters"] == 1
    if not special:
        assert logged["val/longppl"] == pytest.approx(float(theirs["longppl"]), rel=1e-4)
    paper = find_key_tokens(
        open_evaluator(EvaluatorConfig(evaluator, **WINDOWS)).scores(text), document_tokens(data.document), **THRESHOLDS
    ).mask.sum()
    assert paper != theirs["n_key_token"], "the rules differ here, so that this test can fail"
    if model == folders["byte_level_trimmed"]:
        assert logged["val/tokens_without_characters"] > 0, "of the offsets as they are stored"


def test_text_that_a_tokenizer_drops_is_reported_once(tokenizer):
    original, tokenizer = tokenizer, copy.deepcopy(tokenizer)
    for each in (tokenizer, other := copy.deepcopy(original)):
        each.backend_tokenizer.normalizer = normalizers.Replace(Regex("[^a-z ]"), "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_document("bace di bace di 日", tokenizer)
    message = r"cover 8 of the 17 characters.* Further documents are not reported"
    for each in (tokenizer, other):
        with pytest.warns(UserWarning, match=message):
            encode_document("bace di 日本語文字列テスト", each, name="first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_document("bace di 日本語文字列テスト", tokenizer, name="second")


def test_text_of_unknown_tokens_is_reported_once():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with pytest.warns(UserWarning, match="67% of the tokens of document 'first' are unknown .* not reported"):
        encode_document("a b c", tokenizer, name="first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_document("a b c", tokenizer, name="second")


def test_a_cut_that_leaves_no_character_is_refused(folders):
    tokenizer = load_tokenizer(folders["byte_level"])
    for special in (False, True):
        with pytest.raises(ValueError, match="The first `max_tokens` = 1 tokens of document 'e' are white space"):
            encode_document("👩\u200d👧 hello", tokenizer, name="e", max_tokens=1, add_special_tokens=special)
