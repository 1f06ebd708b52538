"""A whole run: the weights it stores, what it does when it is stopped, and how processes share it."""

import json
import os

import numpy as np
import pytest
import torch

from datamodules import PackedTextDataModule, TextDataModule
from datamodules.influence.store import InfluenceStore
from datamodules.influence.writer import InfluenceWriter
from datamodules.packing.sequences import collate_rows
from datamodules.sources.documents import text_folder
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.objectives import CrossEntropy, LongCE, Normalized, Rho1, StoredInfluence
from longce import influence as influence_trainer
from longce.influence import InfluenceTrainer
from tests.conftest import make_text, tiny_model
from tests.support.distributed import run_distributed

LENGTH = 96
SETTINGS = {"context_length": 24, "stride": 8}
TEXTS = [make_text(90, 1), make_text(4, 2), f"Ünïcode 日本語 🙂 {make_text(80, 3)} 日本語 🙂", make_text(100, 4)]


class Folder(PackedTextDataModule):
    """Documents in a folder, the same ones for training and evaluation."""

    def __init__(self, tokenizer, root, **settings):
        super().__init__(str(tokenizer), sequence_length=LENGTH, cache_dir=str(root / "cache"), **settings)
        self.root = root

    def source(self, split):
        return text_folder(self.root / "texts")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "texts" / f"{number}.txt").write_text(text)
    return root


def trainer(folder, **settings):
    settings |= {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return InfluenceTrainer(accelerator="cpu", default_root_dir=folder, use_distributed_sampler=False, **settings)


def run(model_dir, root, output, *, evaluator=None, data=None, objective=None, dtype="float32", **settings):
    module = LongContextLM(str(model_dir), objective=objective or LongCE(4.0), **SETTINGS)
    data = data or Folder(model_dir, root, batch_size=2)
    options = {"evaluator_dtype": dtype, "output": str(output)}
    trainer(root, **settings).influence(module, data, str(evaluator or model_dir), **options)


def stored_rows(model_dir, root, output):
    data = Folder(model_dir, root, influence=str(output))
    data.setup("fit")
    return data.rows


def statistics_of(folder, rows):
    made_from = InfluenceStore(folder).header["made_from"]
    return InfluenceWriter(folder, made_from, rows.rows, len(rows.store.tokens)).statistics()


@pytest.fixture(scope="module")
def own(model_dir, texts):
    """Weights by the model itself."""
    run(model_dir, texts, texts / "own")
    return texts / "own"


def test_weights_by_the_model_itself_are_those_of_longce_at_step_0(own, model_dir, texts):
    backbone = load_backbone(ModelConfig(str(model_dir), dtype="float32")).train()
    rows = stored_rows(model_dir, texts, own)
    boundaries = [row["document_boundaries"] for row in rows]
    assert max(map(len, boundaries)) > 2
    values = []
    for row in rows:
        batch = {key: value.unsqueeze(0) if torch.is_tensor(value) else [value] for key, value in row.items()}
        short = short_log_likelihood(backbone, batch, ShortContext(**SETTINGS))
        online = LongCE(4.0)(backbone(batch).detach(), short, batch)[0]
        scored = row["labels"] != IGNORE_INDEX
        assert (online[scored] != 1).any()
        torch.testing.assert_close(row["influence"][scored], online[scored], rtol=2**-10, atol=1e-6)
        assert (row["influence"][~scored] == 1).all()
        values.append(online[scored].double())
    values = torch.cat(values)
    statistics = statistics_of(own, rows)
    assert statistics["weight_mean"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert statistics["weight_at_cap"] == pytest.approx((values == 4).double().mean().item())
    assert statistics["weight_at_cap"] > 0


def prompts(model_dir, root, **settings):
    """Rows that are not full, of documents whose prompts are longer than their responses."""
    records = [{"prompt": text[: len(text) * 2 // 3], "text": text[len(text) * 2 // 3 :]} for text in TEXTS]
    path = root / "prompts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings |= {"prompt_field": "prompt", "sequence_length": LENGTH, "packing": "best_fit"}
    return TextDataModule(
        str(model_dir), train=str(path), validation=str(path), cache_dir=str(root / "cache"), **settings
    )


def test_weights_of_padded_rows_serve_with_and_without_loss_on_the_prompt(model_dir, texts):
    run(model_dir, texts, texts / "prompts", data=prompts(model_dir, texts, batch_size=2, loss_on_prompt=False))
    backbone = load_backbone(ModelConfig(str(model_dir), dtype="float32")).train()
    values = []
    for loss_on_prompt in (True, False):
        data = prompts(model_dir, texts, influence=str(texts / "prompts"), loss_on_prompt=loss_on_prompt)
        data.setup("fit")
        assert data.rows.rows.padded_tokens > 0
        stored = StoredInfluence(4.0)
        for row in data.rows:
            batch = collate_rows([row])
            short = short_log_likelihood(backbone, batch, ShortContext(**SETTINGS))
            long = backbone(batch).detach()
            online, offline = LongCE(4.0)(long, short, batch), stored(long, None, batch)
            scored = batch["labels"] != IGNORE_INDEX
            torch.testing.assert_close(offline[scored], online[scored], rtol=2**-10, atol=1e-6)
            values += online[scored].tolist() if loss_on_prompt else []
            assert (row["labels"][row["document_boundaries"][-1] :] == IGNORE_INDEX).all()
        share = np.mean([(row["labels"] != IGNORE_INDEX).double().mean() for row in data.rows])
        assert (share > 0.8) == loss_on_prompt
    statistics = statistics_of(texts / "prompts", data.rows)
    assert statistics["weight_mean"] == pytest.approx(np.mean(values), rel=1e-3)


def test_rho_1_trains_on_the_tokens_that_a_reference_model_finds_easier(model_dir, texts, tmp_path):
    """Stored losses of another model, and a selection in float64 with that model at hand."""
    reference = tiny_model("llama", 400, seed=3)
    reference.save_pretrained(tmp_path / "reference")
    load_tokenizer(str(model_dir)).save_pretrained(tmp_path / "reference")
    output = texts / "reference"
    run(model_dir, texts, output, evaluator=tmp_path / "reference", objective=Rho1())
    rows = stored_rows(model_dir, texts, output)
    backbone = load_backbone(ModelConfig(str(tmp_path / "reference"), dtype="float32")).double().eval()
    model = load_backbone(ModelConfig(str(model_dir), dtype="float32"))
    losses = []
    for row in rows:
        batch = collate_rows([row])
        scored = batch["labels"] != IGNORE_INDEX
        expected = -backbone(batch).detach()[scored]
        losses += expected.tolist()
        torch.testing.assert_close(batch["influence"][scored].double(), expected, rtol=2**-10, atol=1e-6)
        own = model(batch).detach()
        excess = -own[scored].double() - expected
        count = round(0.4 * len(excess))
        chosen = excess >= excess.sort(descending=True).values[count - 1]
        weights = Rho1(0.4)(own, None, batch)
        assert weights[~scored].eq(0).all()
        torch.testing.assert_close(weights[scored].double(), chosen.double() * len(excess) / count)
    assert statistics_of(output, rows) == {"loss_mean": pytest.approx(np.mean(losses), rel=1e-3)}


def test_rho_1_needs_a_reference_model_of_the_same_tokens(model_dir, evaluator_dir, texts):
    with pytest.raises(ValueError, match=r"another tokenizer than the training data: choose a reference model"):
        run(model_dir, texts, texts / "x", evaluator=evaluator_dir, objective=Rho1())


def test_complete_weights_are_not_computed_again(own, model_dir, texts, monkeypatch, capsys):
    monkeypatch.setattr(influence_trainer, "load_backbone", None)
    run(model_dir, texts, own)
    printed = capsys.readouterr().out
    assert "already complete" in printed
    assert f"--data.influence {own} --model.objective StoredInfluence --model.objective.gamma 4\n" in printed


@pytest.mark.filterwarnings("ignore:14% of the tokens .* are unknown to the tokenizer")
def test_an_evaluator_with_another_tokenizer(model_dir, evaluator_dir, texts):
    run(model_dir, texts, texts / "other", evaluator=evaluator_dir)
    header = InfluenceStore(texts / "other").header
    assert header["made_from"]["evaluator_tokenizer"] is not None
    rows = stored_rows(model_dir, texts, texts / "other")
    values = torch.cat([row["influence"] for row in rows])
    assert values.min() >= 0
    assert values.max() <= 4
    assert (values != 1).float().mean() > 0.2


def test_a_revision_is_that_of_the_evaluator_and_not_of_another_tokenizer(model_dir, evaluator_dir, texts, monkeypatch):
    seen = []

    def note(name, **options):
        seen.append((name, options["revision"]))
        raise RuntimeError("seen")

    monkeypatch.setattr(influence_trainer, "load_tokenizer", note)
    monkeypatch.setattr(influence_trainer, "check_model", lambda _: None)
    module, data = LongContextLM(str(model_dir), objective=LongCE(4.0), **SETTINGS), Folder(model_dir, texts)
    for tokenizer in (None, str(model_dir)):
        options = {"evaluator_revision": "v1", "evaluator_tokenizer": tokenizer}
        with pytest.raises(RuntimeError, match="seen"):
            trainer(texts).influence(module, data, str(evaluator_dir), **options)
    assert seen == [(str(evaluator_dir), "v1"), (str(model_dir), None)]


def test_on_a_cpu_that_is_slow_in_the_stored_type_it_scores_in_float32(model_dir, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    tiny_model("llama", 400, seed=1, dtype=torch.bfloat16).save_pretrained(tmp_path)
    load_tokenizer(str(model_dir)).save_pretrained(tmp_path)
    for dtype in ("auto", "float32", "bfloat16"):
        run(model_dir, texts, texts / dtype, evaluator=tmp_path, dtype=dtype)
    auto, wide, narrow = (InfluenceStore(texts / dtype) for dtype in ("auto", "float32", "bfloat16"))
    assert auto.header == wide.header, "weights of another type are not mixed in"
    assert np.array_equal(auto.values, wide.values)
    assert not np.array_equal(auto.values, narrow.values)


def test_a_run_that_failed_goes_on_and_computes_each_row_once(own, model_dir, texts, monkeypatch):
    computed = []
    original = InfluenceWriter.write

    def write(self, numbers, weights):
        if len(computed) == 3:
            raise KeyError("stop")
        original(self, numbers, weights)
        computed.extend(numbers)

    data = Folder(model_dir, texts, batch_size=1)
    with monkeypatch.context() as patch:
        patch.setattr(InfluenceWriter, "write", write)
        with pytest.raises(KeyError):
            run(model_dir, texts, texts / "failed", data=data)
    assert len(computed) == 3
    monkeypatch.setattr(InfluenceWriter, "write", lambda self, n, w: computed.extend(n) or original(self, n, w))
    with pytest.raises(ValueError, match="are incomplete"):
        InfluenceStore(texts / "failed")
    run(model_dir, texts, texts / "failed", data=data)
    count = len(stored_rows(model_dir, texts, own))
    assert sorted(computed) == list(range(count))
    assert count > 4
    pair = [torch.tensor(InfluenceStore(texts / name).values[: count * LENGTH]) for name in ("own", "failed")]
    torch.testing.assert_close(*pair, rtol=2**-9, atol=1e-6)


def _share(rank, world_size, model_dir, root, output):
    os.environ["LOCAL_RANK"] = str(rank)
    numbers = []
    original = InfluenceWriter.write
    InfluenceWriter.write = lambda self, n, w: numbers.extend(n) or original(self, n, w)
    for folder in (output, output / "last"):
        run(model_dir, root, folder, data=Folder(model_dir, root, batch_size=1), devices=world_size, strategy="ddp")
        (folder / f"rank{rank}.json").write_text(json.dumps(numbers))
        numbers.clear()


@pytest.mark.slow
def test_two_processes_share_the_rows_and_equal_one(own, model_dir, texts):
    """Runs that were stopped left an even number of rows, and a single one, for which there are too many processes."""
    output, count = texts / "two", len(stored_rows(model_dir, texts, own))
    for folder, done in ((output, 1), (output / "last", count - 1)):
        run(model_dir, texts, folder, data=Folder(model_dir, texts, batch_size=1), limit_predict_batches=done)
    run_distributed(_share, model_dir, texts, output)
    assert [json.loads((output / "last" / f"rank{rank}.json").read_text()) for rank in range(2)] == [[count - 1], []]
    ranks = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert sorted([0, *ranks[0], *ranks[1]]) == list(range(count))
    assert abs(len(ranks[0]) - len(ranks[1])) <= 1
    assert min(map(len, ranks)) > 0
    expected, *found = (InfluenceStore(folder).values[: count * LENGTH] for folder in (own, output, output / "last"))
    for values in found:
        np.testing.assert_allclose(values, expected, rtol=2**-9, atol=1e-6)


def test_what_cannot_work_is_refused_before_anything_is_loaded(model_dir, texts, monkeypatch):
    monkeypatch.setattr(influence_trainer, "load_backbone", None)
    monkeypatch.setattr(Folder, "training_rows", None)
    short = Folder(model_dir, texts)
    short.sequence_length = 32
    for named, options in {
        "objective is LongCE, StoredInfluence or Rho1, got CrossEntropy": {"objective": Normalized(CrossEntropy())},
        "nowhere": {"evaluator": "./nowhere"},
        "`context_length`": {"data": short},
        "packed training sequences": {"data": torch.nn.Module(), "objective": Normalized(StoredInfluence())},
    }.items():
        with pytest.raises(ValueError, match=named):
            run(model_dir, texts, texts / "x", **options)


def test_weights_that_are_no_numbers_stop_the_run(model_dir, texts, monkeypatch):
    monkeypatch.setattr(
        influence_trainer, "compute_influence", lambda batch, *_, **__: torch.full(batch["labels"].shape, torch.nan)
    )
    with pytest.raises(FloatingPointError, match=r"sequence\(s\) \[0, 1\] are not finite.*evaluator_dtype"):
        run(model_dir, texts, texts / "nan")
