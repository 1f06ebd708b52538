import copy
import math
import os
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.context_extension.methods import METHODS, ContextExtension
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone, load_config
from lightning_modules.models.short_context import long_and_short
from lightning_modules.objectives import CrossEntropy
from tests.conftest import tiny_config, tiny_model
from tests.support.architectures import ROPE
from tests.support.tiny_training import VOCABULARY, loader, row, trainer

ORIGINAL, TARGET = 64, 512
FACTOR = TARGET / ORIGINAL
OPTIONS = {
    "abf": {"base": 70000.0},
    "yarn": {"attention_factor": 1.5},
    "ntk_by_parts": {"beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
    "longrope": {"attention_factor": 1.25},
}


def folder_of(architecture, tmp_path, **overrides):
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        **ROPE.get(architecture, {}),
    }
    tiny_model(architecture, 50, **{**settings, **overrides}).save_pretrained(tmp_path / architecture)
    return str(tmp_path / architecture)


def extension(method, width=16, **options):
    settings = {"method": method, "original_length": ORIGINAL, "target_length": TARGET, **options}
    if method.endswith("_authors"):
        settings |= {"original_length": 4096, "target_length": 4096 * 8}
    if method == "longrope":
        settings["long_factor"] = [1 + number / 2 for number in range(width // 2)]
    return settings


def formula(method, width, options, base=10000.0):
    """Inverse frequencies, one by one in float64, and the factor of cos and sin, as the papers define them."""
    plain = [base ** (-2 * j / width) for j in range(width // 2)]
    turns = [ORIGINAL * frequency / (2 * math.pi) for frequency in plain]  # of a component in the original length
    if method in ("pi", "pi_authors"):
        return [frequency / FACTOR for frequency in plain], 1.0
    if method in ("abf", "eabf", "eabf_authors"):
        return formula("none", width, {}, options.get("base", 500000.0))
    if method == "ntk":
        return formula("none", width, {}, base * FACTOR ** (width / (width - 2)))
    if method == "longrope":
        divisors = extension("longrope", width)["long_factor"]
        default = math.sqrt(1 + math.log(FACTOR) / math.log(ORIGINAL))
        return [f / divisor for f, divisor in zip(plain, divisors, strict=True)], options.get(
            "attention_factor", default
        )
    if method == "llama3":
        low, high = options.get("low_freq_factor", 1.0), options.get("high_freq_factor", 4.0)
        kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    elif method in ("yarn", "ntk_by_parts"):

        def index(turn):  # of the component that makes so many turns, which the code rounds
            return width * math.log(ORIGINAL / (turn * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(index(options.get("beta_fast", 32.0))), 0)
        last = min(math.ceil(index(options.get("beta_slow", 1.0))), width - 1)
        kept = [1 - min(max((j - first) / max(last - first, 0.001), 0.0), 1.0) for j in range(width // 2)]
    else:
        kept = [1.0] * (width // 2)  # none, and dynamic within the original length
    attention = options.get("attention_factor", 0.1 * math.log(FACTOR) + 1) if method == "yarn" else 1.0
    return [f * k + f / FACTOR * (1 - k) for f, k in zip(plain, kept, strict=True)], attention


def check_formula(model, method, width, options):
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    frequencies, attention = formula(method, width, options)
    if method in PATTERNS:  # they rotate themselves
        frequencies = [0.0] * (width // 2)
    assert rotary.inv_freq.dtype == torch.float32
    expected = torch.tensor(frequencies, dtype=torch.float64)
    torch.testing.assert_close(rotary.inv_freq.double(), expected, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(attention, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_frequencies_before_and_after_saving(method, tmp_path):
    path = folder_of("llama", tmp_path)
    for number, options in enumerate([{}, OPTIONS.get(method, {})][: 1 + (method in OPTIONS)]):
        backbone = load_backbone(ModelConfig(path, context_extension=extension(method, **options)))
        check_formula(backbone, method, 16, options)
        backbone.model.save_pretrained(tmp_path / f"saved{number}")
        again = load_backbone(ModelConfig(str(tmp_path / f"saved{number}")))
        check_formula(again, method, 16, options)
        assert again.base_model.config.rope_parameters == backbone.base_model.config.rope_parameters
        target = extension(method)["target_length"]
        assert again.base_model.config.max_position_embeddings == (ORIGINAL if method == "dynamic_ntk" else target)


def test_phi3_goes_by_the_original_length_of_the_extension(tmp_path):
    path = folder_of("phi3", tmp_path, original_max_position_embeddings=128)
    config = load_config(ModelConfig(path, context_extension=extension("longrope", 12)))
    assert config.original_max_position_embeddings == ORIGINAL
    assert config.rope_parameters["original_max_position_embeddings"] == ORIGINAL


def test_dynamic_ntk_is_ntk_for_the_length_of_the_text(tmp_path):
    model = load_backbone(ModelConfig(folder_of("llama", tmp_path), context_extension=extension("dynamic_ntk"))).model
    model(torch.zeros(1, TARGET, dtype=torch.int64), use_cache=False)
    check_formula(model, "ntk", 16, {})


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 32}),
        ("mixtral", {"sliding_window": 32}),
        ("phi3", {"sliding_window": 32}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ],
)
def test_full_attention_switches_sliding_windows_off_where_asked(architecture, settings, tmp_path):
    path = folder_of(architecture, tmp_path, **settings)
    tokens = torch.randint(50, (1, 80), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 50
    for asked in (False, True):
        model = load_backbone(ModelConfig(path, context_extension=extension("abf", full_attention=asked))).model.eval()
        model.save_pretrained(tmp_path / "saved")
        for part in (model, load_backbone(ModelConfig(str(tmp_path / "saved"))).model.eval()):
            if asked:  # each of these, as readers of the saved config differ in which they look at
                assert getattr(part.config, "sliding_window", None) is None
                assert not getattr(part.config, "use_sliding_window", False)
                assert set(getattr(part.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            far = (part(tokens).logits - part(other).logits)[0, 60:].abs().max()  # of one layer: beyond its window
            assert (far > 1e-4) == asked


def test_presets_of_the_released_code(tmp_path):
    llama, mistral = (folder_of(name, tmp_path, **window) for name, window in (("llama", {}), ("mistral", {})))
    eabf = load_config(ModelConfig(llama, context_extension=extension("eabf_authors")))
    assert eabf.rope_parameters["rope_theta"] == 500000.0
    assert eabf.rope_parameters["unscaled_layers"] == 0
    assert load_config(ModelConfig(llama, context_extension=extension("eabf"))).rope_parameters["unscaled_layers"] == 2
    eabf = load_config(
        ModelConfig(mistral, model_config={"sliding_window": 32}, context_extension=extension("eabf_authors"))
    )
    assert eabf.rope_parameters["rope_theta"] == 10000.0
    assert eabf.sliding_window is None
    pi = load_config(
        ModelConfig(mistral, model_config={"sliding_window": 32}, context_extension=extension("pi_authors"))
    )
    assert pi.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert pi.sliding_window is None
    assert load_config(ModelConfig(llama, context_extension=extension("pi_authors"))).rope_parameters["factor"] == 8.0


REFUSED = [
    ("original_length", {"method": "pi", "target_length": 512}),
    ("target_length", {"method": "pi", "original_length": 64}),
    ("pose", extension("pose")),
    ("bas", extension("abf", bas=2.0)),
    ("base", extension("pi", base=5e5)),
    ("base", extension("eabf", base=5000.0)),
    ("attention_factor", extension("yarn", attention_factor=-1)),
    ("original_length", extension("pi") | {"original_length": 1}),
    ("target_length", extension("pi") | {"target_length": 512.5}),
    ("target_length", extension("pi") | {"target_length": 64}),
    ("beta_slow", extension("yarn", beta_slow=40)),
    ("long_factor", extension("pi") | {"method": "longrope"}),
    ("long_factor", extension("longrope", 10)),
    ("long_factor", extension("pi") | {"method": "longrope", "long_factor": [math.nan] * 8}),
    ("original_length", extension("pi") | {"method": "pi_authors"}),
    ("sinks", extension("streaming_llm", sinks=[3])),
    ("sinks", extension("rerope", sinks=3)),
    ("window", extension("streaming_llm", window=0)),
    ("window", extension("streaming_llm", sinks=4, window=61)),
    ("window", extension("rerope", window=64)),
    ("group", extension("self_extend", group=8)),
    ("chunk", extension("dual_chunk", chunk=64)),
    ("segment_lengths", extension("longnet", segment_lengths=[8, 16])),
    ("dilation_rates", extension("longnet", segment_lengths=[], dilation_rates=[])),
    ("dilation_rates", extension("longnet", segment_lengths=[8], dilation_rates=[2])),
    ("segment_lengths", extension("longnet", segment_lengths=[8, 12], dilation_rates=[1, 2])),
    ("segment_lengths", extension("longnet", segment_lengths=[8, 8], dilation_rates=[1, 2])),
]


@pytest.mark.parametrize(("option", "settings"), REFUSED)
def test_wrong_settings(option, settings, tmp_path):
    tiny_config("llama", 50, hidden_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=option):
        load_config(ModelConfig(str(tmp_path / "config.json"), context_extension=settings))


def test_rotary_that_is_not_what_the_config_says(tmp_path):
    model = load_backbone(ModelConfig(folder_of("llama", tmp_path), context_extension=extension("yarn"))).model
    check_rotary(model)
    rounded = copy.deepcopy(model)
    rounded.model.rotary_emb.inv_freq = rounded.model.rotary_emb.inv_freq.bfloat16().float()
    changed = copy.deepcopy(model)
    changed.config.rope_parameters["factor"] = 9.0
    factor = copy.deepcopy(model)
    factor.model.rotary_emb.attention_scaling = 1.0
    for wrong in (rounded, changed, factor):
        with pytest.raises(RuntimeError, match="do not match the model's config"):
            check_rotary(wrong)


def watch(method, seen):
    """Compare with the formula at the start of every stage, after all setup, and note the stage."""

    def look(stage, _, module, *rest):
        check_formula(module, method, 8, {})
        seen.add(stage)

    hooks = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
    return LambdaCallback(**{f"on_{name}_batch_start": partial(look, stage) for stage, name in hooks.items()})


def batches(count=1):
    rows = [row(number) for number in range(count)]
    for part in rows:
        part["text"], part["offsets"] = ["text"], torch.zeros(1, part["input_ids"].shape[1], 2, dtype=torch.int64)
    return loader(*rows)


STAGES = {
    "fit": lambda run, module: run.fit(module, batches(2)),
    "validate": lambda run, module: run.validate(module, batches(), verbose=False),
    "test": lambda run, module: run.test(module, batches(), verbose=False),
    "predict": lambda run, module: run.predict(module, batches()),
}


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", VOCABULARY, seed=6).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "precision", "strategy"),
    [
        ("eabf", "32-true", "auto"),
        ("yarn", "bf16-mixed", "auto"),
        ("eabf", "bf16-true", "auto"),
        ("streaming_llm", "bf16-true", "auto"),
        ("xpos", "bf16-mixed", "auto"),
        ("yarn", "bf16-true", "ddp"),
        ("eabf", "32-true", "ddp"),
    ],
)
def test_frequencies_in_every_stage_precision_and_strategy(method, precision, strategy, folder, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    module = LongContextLM(folder, context_length=8, stride=4, context_extension=extension(method))
    seen = set()
    try:
        for run in STAGES.values():
            run(
                trainer(tmp_path, precision=precision, strategy=strategy, devices=1, callbacks=[watch(method, seen)]),
                module,
            )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.pop("LOCAL_RANK", None)
    assert seen == set(STAGES)


class CastsBlindly(Callback):
    """As a strategy that casts everything."""

    def setup(self, trainer, pl_module, stage):
        pl_module.configure_model()
        pl_module.backbone.model.to(torch.bfloat16)


@pytest.mark.parametrize("stage", STAGES)
def test_cast_frequencies_are_noticed_at_the_start_of_every_stage(stage, folder, tmp_path):
    module = LongContextLM(folder, context_length=8, stride=4, context_extension=extension("eabf"))
    with pytest.raises(RuntimeError, match=r"were cast to torch\.bfloat16"):
        STAGES[stage](trainer(tmp_path, callbacks=[CastsBlindly()]), module)


def test_rotation_by_the_length_of_the_text(folder, tmp_path):
    module = LongContextLM(folder, objective=CrossEntropy(), context_extension=extension("dynamic_ntk"))
    with pytest.raises(ValueError, match="'dynamic' depends on the length of the text, so that training has no fixed"):
        module.check_early(128)
    with pytest.raises(ValueError, match="'dynamic' depends on the length"):
        trainer(tmp_path).fit(module, batches())
    module.check_early(None)  # evaluation
    trainer(tmp_path).validate(module, batches(), verbose=False)
    module = LongContextLM(folder, context_length=8, stride=4, context_extension=extension("dynamic_ntk"))
    with pytest.raises(ValueError, match="a long and a short context cannot be compared"):
        trainer(tmp_path).predict(module, batches())


def test_longrope_is_compared_only_if_it_does_not_switch(tmp_path):
    tiny_model("phi3", VOCABULARY, hidden_size=64).save_pretrained(tmp_path / "phi3")
    scorer = load_backbone(ModelConfig(str(tmp_path / "phi3"), context_extension=extension("longrope")))
    long_and_short(scorer, row(0), ShortContext(8, 4))
    switching = {**scorer.base_model.config.rope_parameters, "short_factor": [1.0] * 8}
    path = str(tmp_path / "phi3")
    scorer = load_backbone(
        ModelConfig(path, model_config={"rope_parameters": switching, "max_position_embeddings": TARGET})
    )
    with pytest.raises(ValueError, match="'longrope' depends on the length"):
        long_and_short(scorer, row(0), ShortContext(8, 4))
    module = LongContextLM(path, model_config={"rope_parameters": switching}, context_length=8, stride=4)
    with pytest.raises(ValueError, match="'longrope' depends on the length"):
        module.check_early(128)


def test_the_extension_is_kept_in_a_checkpoint(folder, tmp_path):
    module = LongContextLM(folder, context_length=8, stride=4, context_extension=extension("yarn"))
    run = Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    run.fit(module, batches())
    run.save_checkpoint(tmp_path / "last.ckpt")
    again = LongContextLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert again.hparams["context_extension"] == extension("yarn")
    check_formula(again, "yarn", 8, {})


def test_settings_that_are_no_mapping_are_refused_and_no_file_is_read(tmp_path):
    file = tmp_path / "yarn.yaml"
    file.write_text("{method: yarn, original_length: 8, target_length: 16}")
    with pytest.raises(ValueError, match="must be a mapping"):
        ContextExtension.parse(str(file))
