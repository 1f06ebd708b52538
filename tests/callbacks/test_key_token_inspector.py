import re

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader

from callbacks import ExternalEvaluator, KeyTokenInspector
from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.functional import PowerLaw, fit_power_law, span_token_mask
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.short_context import long_and_short
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.key_tokens import key_spans
from lightning_modules.scoring.token_scores import text_sha256
from lightning_modules.visualization.tensorboard import panels
from lightning_modules.visualization.tensorboard.panels import probability
from lightning_modules.visualization.tensorboard.sums import PositionSums
from tests.conftest import make_text
from tests.support.texts import write_key_spans
from tests.support.trainers import quiet_trainer

# One of the texts is too short for a key token.
pytestmark = pytest.mark.filterwarnings(r"ignore:\d of \d val documents have no key token")

LENGTHS = {"context_length": 48, "stride": 16}
JUDGED = {**LENGTHS, "alpha": 0.5, "beta": -6.0}
TEXTS = [
    make_text(70, seed=1),
    make_text(45, seed=2) + " <script>|*` " + make_text(45, seed=4),
    "too short",
    make_text(80, seed=3),
]


@pytest.fixture
def documents(tokenizer):
    return [encode_document(text, tokenizer, name=f"doc{n} by X") for n, text in enumerate(TEXTS)]


class Losses(LongContextLM):
    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.losses = [*getattr(self, "losses", []), float(self.trainer.callback_metrics["train/loss"])]


def fit(model_dir, callbacks, documents, folder, logger=None, **settings):
    torch.manual_seed(0)
    settings = {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1, **settings}
    settings["logger"] = TensorBoardLogger(folder, name="", version="") if logger is None else logger
    trainer = quiet_trainer(folder, *callbacks, **settings)
    module = Losses(str(model_dir), **LENGTHS, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    rows = [documents[number] for number in (0, 1, 3)] * 4
    trainer.fit(module, DataLoader(rows, batch_size=None), DataLoader(documents, batch_size=None))
    return module, trainer


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


def texts(events, tag):
    found = events.Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in found}


@pytest.fixture(scope="module")
def run(model_dir, evaluator_dir, tokenizer, tmp_path_factory):
    """A short training with both callbacks, the inspector first, as the order must not matter."""
    folder = tmp_path_factory.mktemp("run")
    documents = [encode_document(text, tokenizer, name=f"doc{n} by X") for n, text in enumerate(TEXTS)]
    evaluator = ExternalEvaluator(str(evaluator_dir), **JUDGED, before_training=False, cache_dir=str(folder / "cache"))
    inspector = KeyTokenInspector(documents=2, weights_every_n_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PowerLaw, "is_determined", True)  # a random model has none
        module, trainer = fit(model_dir, [inspector, evaluator], documents, folder / "logs")
    return module, trainer, evaluator, inspector, documents, read(folder / "logs")


def test_what_does_not_change_is_drawn_once_and_the_rest_at_each_evaluation(run):
    events = run[-1]
    once = ["lsd_and_lcl/evaluator", "loss_by_context/evaluator"]
    each = ["loss_by_context/model_all_documents"]
    assert set(events.Tags()["images"]) == {*once, *each}
    assert {tag: [image.step for image in events.Images(tag)] for tag in once} == {tag: [2] for tag in once}
    assert {tag: [image.step for image in events.Images(tag)] for tag in each} == {tag: [2, 4] for tag in each}
    assert list(texts(events, "most_helped_tokens/evaluator")) == [2]
    assert list(texts(events, "most_helped_tokens/model")) == [2, 4]


def test_the_table_tells_the_evaluators_numbers(run):
    _, _, evaluator, *_, events = run
    helped = []
    for number in (0, 1):  # the inspected documents
        scores = evaluator.evaluated[text_sha256(TEXTS[number])].scores
        helped += zip((scores.long - scores.short).tolist(), scores.long.tolist(), strict=True)
    expected = sorted(helped, reverse=True)[:20]
    lines = texts(events, "most_helped_tokens/evaluator")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert [float(row[3]) for row in cells] == pytest.approx([lsd for lsd, _ in expected], abs=0.006)
    assert [row[1] for row in cells] == [probability(long) for _, long in expected]
    assert [row[4] == "yes" for row in cells] == [lsd > 0.5 and long > -6.0 for lsd, long in expected]


def test_key_tokens_are_the_evaluators_and_their_likelihoods_the_models(run):
    module, _, evaluator, _, documents, events = run
    key = [
        span_token_mask(
            documents[number]["offsets"][0],
            key_spans(evaluator.evaluated[text_sha256(TEXTS[number])].scores, alpha=0.5, beta=-6.0),
        )
        for number in (0, 1)
    ]
    with torch.no_grad():
        now = torch.cat([module.backbone.eval()(documents[number])[0][key[number]] for number in (0, 1)])
    (histogram,) = events.Histograms("key_tokens/model_log_likelihood_nats")[1:]
    assert histogram.histogram_value.num == len(now) > 0
    assert histogram.histogram_value.sum == pytest.approx(float(now.sum()), rel=1e-5)


def test_loss_by_context_and_its_power_law_are_of_all_documents(run):
    module, *_, documents, events = run
    positions = PositionSums(1)
    for document in documents:
        scored = document["labels"].ne(IGNORE_INDEX)
        with torch.no_grad():
            positions.add(document["position_ids"][scored], -module.backbone.eval()(document)[scored])
    context, loss = positions.means()
    expected = fit_power_law(context[context >= 16], loss[context >= 16])
    for name, value in expected._asdict().items():
        assert events.Scalars(f"val/power_law_{name}")[-1].value == pytest.approx(value, rel=1e-3)


def test_weights_are_drawn_at_the_steps_asked_for(run):
    histograms = run[-1].Histograms("train/token_weights")
    assert [event.step for event in histograms] == [1, 2, 4]
    scored = run[4][0]["labels"].ne(IGNORE_INDEX).sum()
    first = histograms[0].histogram_value
    assert first.num == scored
    weights = run[-1].Scalars("train/weight_mean")[0].value
    assert first.sum / first.num == pytest.approx(weights, rel=1e-5)
    assert first.max <= 5
    module, inspector = run[0], run[3]
    assert (module.token_observers, inspector._writers) == ([], []), "nothing stays behind"
    assert all(document.scores.long.device.type == "cpu" for document in inspector._inspected)
    differences = run[-1].Histograms("train/lsd_nats")[0].histogram_value
    assert 0 < differences.num == scored - 48 - 15, "tokens with a short context"


@pytest.mark.slow
def test_losses_are_those_without_it_bit_for_bit(model_dir, documents, tmp_path):
    settings = {"accumulate_grad_batches": 2, "max_steps": 3}
    plain, _ = fit(model_dir, [], documents, tmp_path / "a", **settings)
    watched, _ = fit(model_dir, [KeyTokenInspector(weights_every_n_steps=1)], documents, tmp_path / "b", **settings)
    assert len(plain.losses) == 3
    assert watched.losses == plain.losses
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(read(tmp_path / "b").Tensors("custom_scalars__config__")) == 1, "also without an evaluator"
    histograms = read(tmp_path / "b").Histograms("train/token_weights")
    assert [event.step for event in histograms] == [1, 2, 3]
    lengths = [documents[number]["labels"].ne(IGNORE_INDEX).sum() for number in (0, 1, 3)]
    assert histograms[0].histogram_value.num == lengths[0] + lengths[1], "both micro-batches"


def test_without_an_evaluator_the_models_own_scores_tell_key_tokens(model_dir, documents, tmp_path):
    inspector = KeyTokenInspector(documents=["doc3", "nowhere"], alpha=0.5, beta=-6.0)
    with pytest.warns(UserWarning, match=r"found only \['doc3 by X'\]"):
        module, _ = fit(model_dir, [inspector], documents, tmp_path, max_steps=2)
    events = read(tmp_path)
    assert "most_helped_tokens/evaluator/text_summary" not in events.Tags()["tensors"]
    long, short = (part[0] for part in long_and_short(module.backbone.eval(), documents[3], ShortContext(**LENGTHS)))
    key = (long - short > 0.5) & (long > -6.0)
    (histogram,) = events.Histograms("key_tokens/model_log_likelihood_nats")
    assert histogram.histogram_value.num == key.sum() > 0
    most = f"| {float((long - short).max()):.2f} |"
    assert most in texts(events, "most_helped_tokens/model")[2].splitlines()[2]
    torch.testing.assert_close(inspector._inspected[0].scores.short, short)


def test_figures_of_the_model_leave_out_the_prompts_of_chats(model_dir, documents, tmp_path, monkeypatch):
    chat = documents[3].copy()
    chat["labels"] = chat["labels"].clone()
    chat["labels"][:, 100:140] = IGNORE_INDEX
    drawn = []
    monkeypatch.setattr(panels, "position_figure", lambda positions, **_: drawn.append(positions.sums) or Figure())
    trainer = quiet_trainer(None, KeyTokenInspector(documents=1), logger=TensorBoardLogger(tmp_path))
    module = LongContextLM(str(model_dir), **LENGTHS)
    trainer.validate(module, DataLoader([with_scored(chat)], batch_size=None), verbose=False)
    inspected, evaluated = drawn
    assert inspected[0].sum() == chat["labels"].ne(IGNORE_INDEX).sum()
    torch.testing.assert_close(inspected[:3], evaluated)  # numbers of tokens, positions and losses


@pytest.mark.slow
def test_precomputed_spans(model_dir, documents, tmp_path):
    for number in range(4):
        write_key_spans(tmp_path / "spans" / f"doc{number}.txt", torch.tensor([[0, 9]]))
    evaluator, inspector = ExternalEvaluator(key_spans=str(tmp_path / "spans")), KeyTokenInspector(short_context=False)
    fit(model_dir, [evaluator, inspector], documents, tmp_path / "logs", max_steps=2)
    masks = [
        span_token_mask(document["offsets"][0], torch.tensor([[0, 9]])) & document["labels"][0].ne(IGNORE_INDEX)
        for document in documents[:2]
    ]
    histograms = read(tmp_path / "logs").Histograms("key_tokens/model_log_likelihood_nats")
    expected = sum(int(mask.sum()) for mask in masks)
    assert [event.histogram_value.num for event in histograms] == [expected, expected]


def test_other_loggers_get_nothing_and_one_warning(model_dir, documents, tmp_path):
    inspector = KeyTokenInspector()
    with pytest.warns(UserWarning, match="no `TensorBoardLogger`") as caught:
        _, trainer = fit(model_dir, [inspector], documents, tmp_path, logger=CSVLogger(tmp_path), max_steps=2)
    assert sum("TensorBoardLogger" in str(warning.message) for warning in caught) == 1
    assert not any(name.startswith("val/power_law") for name in trainer.callback_metrics)
    assert inspector._inspected == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"short_context": False}, "`short_context: true`"),
    ],
)
def test_bad_settings_are_refused_before_training(model_dir, documents, tmp_path, settings, named):
    with pytest.raises(ValueError, match=named):
        fit(model_dir, [KeyTokenInspector(**settings)], documents, tmp_path)


def test_longppl_stands_beside_perplexity(run):
    (event,) = run[-1].Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    tags = set(run[-1].Tags()["scalars"])
    (longppl,), (perplexity,) = list(charts.values())[:2]
    for cell in ("", "books/", "books/judge/", "books/judge/loose/"):
        assert re.fullmatch(longppl.strip("^$"), f"val/{cell}longppl")
        assert re.fullmatch(perplexity.strip("^$"), f"val/{cell}perplexity")
    assert not re.fullmatch(longppl.strip("^$"), "val/longppl_soft")
    assert all(any(re.fullmatch(tag, known) for known in tags) for chart in charts.values() for tag in chart)


class Sane(KeyTokenInspector):
    def on_sanity_check_end(self, trainer, pl_module):
        self.inspected = list(self._inspected)


@pytest.mark.slow
def test_the_sanity_check_scores_and_draws_nothing(model_dir, evaluator_dir, documents, tmp_path):
    evaluator = ExternalEvaluator(str(evaluator_dir), **JUDGED, cache_dir=str(tmp_path / "cache"))
    inspector, settings = Sane(), {"num_sanity_val_steps": 2, "limit_val_batches": 2, "val_check_interval": 4}
    fit(model_dir, [evaluator, inspector], documents, tmp_path / "logs", **settings)
    assert inspector.inspected == []
    events = read(tmp_path / "logs")
    for name, steps in (("model", [0, 4]), ("evaluator", [0])):  # before training and after it; drawn once
        assert list(texts(events, f"most_helped_tokens/{name}")) == steps
