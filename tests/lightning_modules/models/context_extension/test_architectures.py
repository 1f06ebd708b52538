"""Every architecture and method: the frequencies by formula, and the whole model in float64 with dense attention."""

import copy
import functools
import math

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from lightning_modules.batch import pack_sequence
from lightning_modules.models.context_extension.architectures import (
    ARCHITECTURES,
    EABF_ARCHITECTURES,
    PATTERN_ARCHITECTURES,
    REFUSED,
)
from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.context_extension.frequencies import global_parameters, parameter_sets
from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from tests.lightning_modules.models.context_extension.patterns import dense
from tests.support.architectures import tiny_config

ORIGINAL, TARGET, LENGTH, LAYERS = 16, 64, 60, 4
FACTOR = TARGET / ORIGINAL
STATIC = ("pi", "abf", "ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
BASE = 5e7
PATTERNS = {
    "streaming_llm": {"sinks": 2, "window": 9},
    "lm_infinite": {"sinks": 3},
    "rerope": {"window": 7},
    "self_extend": {"window": 5, "group": 6},
    "dual_chunk": {"chunk": 9},
}
PARTIAL = {"gpt_neox": 0.5, "phi": 0.5, "qwen3_next": 0.5}  # or a head of 8 components has one pair


def config_of(architecture):
    config = tiny_config(architecture)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = LAYERS
    if kinds:
        config.layer_types = (list(kinds) * LAYERS)[:LAYERS]
    if hasattr(config, "sliding_window") and not kinds:
        config.sliding_window = None
    if architecture == "smollm3":
        config.no_rope_layers = [1, 0, 1, 0]
    if architecture in PARTIAL:
        config.rope_parameters["partial_rotary_factor"] = PARTIAL[architecture]
    if architecture == "gpt_oss":  # which ships with YaRN
        config.rope_parameters = {"rope_type": "default", "rope_theta": 150000.0}
    return config


def extension(method, config, original=ORIGINAL, target=TARGET, **options):
    settings = {"method": method, "original_length": original, "target_length": target, **PATTERNS.get(method, {})}
    if method in ("abf", "eabf"):
        settings["base"] = BASE
    if method == "longrope":
        settings["long_factor"] = divisors(config)
    return {**settings, **options}


def divisors(config):
    return [1 + number / 2 for number in range(width_of(config) // 2)]


def width_of(config):
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width * global_parameters(config).get("partial_rotary_factor", 1.0))


def plain(base, width):
    return [base ** (-2 * j / width) for j in range(width // 2)]


def formula(method, frequencies, *, base, options, original=ORIGINAL, factor=FACTOR):
    """The method's frequencies, one by one, from those of a model, and the factor of cos and sin.

    With a base, those are plain RoPE, where YaRN's code rounds the ends of its ramp.
    """
    half = len(frequencies)
    width = 2 * half
    turns = [original * frequency / (2 * math.pi) for frequency in frequencies]
    if method == "pi":
        return [frequency / factor for frequency in frequencies], 1.0
    if method in ("abf", "eabf"):
        return plain(BASE, width), 1.0
    if method == "ntk":
        return [f * factor ** (-2 * j / (width - 2)) for j, f in enumerate(frequencies)], 1.0
    if method == "longrope":
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
        return [f / divisor for f, divisor in zip(frequencies, options["long_factor"], strict=True)], attention
    if method == "llama3":
        kept = [min(max((turn - 1) / 3, 0.0), 1.0) for turn in turns]
    elif base is None:
        kept = [min(max(math.log(turn) / math.log(32), 0.0), 1.0) for turn in turns]
    else:

        def index(turn):
            return width * math.log(original / (turn * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(index(32)), 0)
        last = min(math.ceil(index(1)), width - 1)
        kept = [1 - min(max((j - first) / max(last - first, 0.001), 0.0), 1.0) for j in range(half)]
    attention = 0.1 * math.log(factor) + 1 if method == "yarn" else 1.0
    return [f * k + f / factor * (1 - k) for f, k in zip(frequencies, kept, strict=True)], attention


@functools.cache
def rotary_class(architecture):
    model = AutoModelForCausalLM.from_config(config_of(architecture))
    return type(next(part for part in model.modules() if any(name.endswith("inv_freq") for name in part._buffers)))


def check_frequencies(architecture, config, frequencies, attention):
    """Those of the layers that see the whole text; the others keep theirs."""
    rotary = rotary_class(architecture)(config)
    found = 0
    for kind, parameters in parameter_sets(config).items():
        prefix = "" if kind is None else f"{kind}_"
        expected, factor = frequencies, attention
        if kind == "sliding_attention":
            assert parameters["rope_type"] == "default"
            expected, factor = plain(parameters["rope_theta"], 2 * len(frequencies)), 1.0
        actual = getattr(rotary, f"{prefix}inv_freq").double()
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=0)
        assert getattr(rotary, f"{prefix}attention_scaling") == pytest.approx(factor, rel=1e-6)
        found += 1
    assert found == len(parameter_sets(config))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", STATIC)
def test_frequencies(architecture, method):
    config = config_of(architecture)
    base = global_parameters(config)["rope_theta"]
    settings = extension(method, config)
    width = width_of(config)
    extend_config(config, settings)
    check_frequencies(architecture, config, *formula(method, plain(base, width), base=base, options=settings))
    assert config.max_position_embeddings == TARGET
    assert type(config).from_dict(config.to_dict()).rope_parameters == config.rope_parameters


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "gemma3_text", "gpt_neox"))],
)
@pytest.mark.parametrize("second", STATIC)
@pytest.mark.parametrize("first", STATIC)
def test_a_second_extension_starts_from_the_frequencies_of_the_first(first, second, architecture):
    config = config_of(architecture)
    base = global_parameters(config)["rope_theta"]
    settings = extension(first, config)
    width = width_of(config)
    extend_config(config, settings)
    once, attention = formula(first, plain(base, width), base=base, options=settings)
    settings = extension(second, config, original=TARGET, target=3 * TARGET)
    extend_config(config, settings)
    same = first == second and first in ("pi", "ntk_by_parts", "yarn", "llama3") and architecture != "phi3"
    if second == "abf":  # only the base changes, and the first method stays
        twice, attention = formula(first, plain(BASE, width), base=BASE, options={"long_factor": divisors(config)})
        if first == "ntk":
            twice = plain(BASE, width)
        if architecture == "phi3" and first in ("pi", "ntk_by_parts", "yarn", "llama3"):  # its divisors stay
            twice = [f * new / old for f, new, old in zip(once, plain(BASE, width), plain(base, width), strict=True)]
    elif same:  # one extension by both factors
        twice, attention = formula(first, plain(base, width), base=base, options=settings, factor=3 * FACTOR)
    else:
        # The base of plain RoPE, of which YaRN's code rounds its ramp.
        is_plain = first in ("abf", "ntk")
        current = BASE if first == "abf" else base * FACTOR ** (width / (width - 2))
        twice, further = formula(
            second, once, base=current if is_plain else None, options=settings, original=TARGET, factor=3
        )
        attention *= further
    check_frequencies(architecture, config, twice, attention)


def is_local(config, layer):
    kinds = getattr(config, "layer_types", None)
    return bool(kinds) and kinds[layer] == "sliding_attention"


def dense_attention(module, query, key, value, attention_mask, scaling, change, **kwargs):
    """Attention of a whole text in float64, with the keys of each head, ``[T, T]`` changes and a window."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = distance < 0
    if kwargs.get("sliding_window"):
        hidden |= distance >= kwargs["sliding_window"]
    logits = query @ key.mT * scaling * change
    return (logits.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


def scaled(module, query, *args, position_ids, **kwargs):
    """EABF: the logits of each query times its scale, in all global layers but the first two."""
    scale = [max(1.0, math.log(position + 1) / math.log(ORIGINAL)) for position in position_ids[0].tolist()]
    if module.layer_idx < 2 or is_local(module.config, module.layer_idx):
        scale = [1.0] * len(scale)
    return dense_attention(module, query, *args, change=torch.tensor(scale, dtype=torch.float64)[:, None], **kwargs)


def relocated(name, frequencies):
    """A pattern by the distances of its formula, on queries and keys that are not rotated."""

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        if is_local(module.config, module.layer_idx):
            return dense_attention(module, query, key, value, attention_mask, scaling, change=1.0, **kwargs)
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        theta = frequencies if getattr(module, "use_rope", True) else [0.0] * len(frequencies)
        query = query * scaling * math.sqrt(query.shape[-1])  # the formula divides by the root of the width
        parameters = {**PATTERNS[name], "original_max_position_embeddings": ORIGINAL}
        output = dense.attention(name, parameters, query[0], key[0], value[0], theta, 2 * len(frequencies))
        return output[None].transpose(1, 2).contiguous(), None

    return attend


@torch.no_grad()
def reference(config, weights, attend):
    """``[T]`` log-likelihoods of a text by transformers' model in float64 with another attention."""
    AttentionInterface.register("dense_reference", attend)
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.load_state_dict(weights)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name.endswith("inv_freq") and config._zeroed and not name.startswith("sliding"):
                buffer.zero_()
    model = model.double().eval()
    model.set_attn_implementation("dense_reference")
    tokens = text()
    logits = model(tokens, use_cache=False).logits[0].log_softmax(-1)
    return logits[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


def text():
    return torch.randint(2, 120, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_against_dense(architecture, settings, attend, changed, tmp_path, *, zeroed=False):
    torch.manual_seed(0)
    config = config_of(architecture)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backbone = load_backbone(ModelConfig(str(tmp_path), context_extension=settings)).eval()
    check_rotary(backbone.base_model)
    actual = backbone(pack_sequence([text()[0]]))[0, 1:]
    changed._zeroed = zeroed
    expected = reference(changed, backbone.base_model.state_dict(), attend)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
    without = load_backbone(ModelConfig(str(tmp_path))).eval()(pack_sequence([text()[0]]))[0, 1:]
    assert (without - actual).abs().max() > 1e-2  # or the comparison would show nothing


@pytest.mark.parametrize("architecture", EABF_ARCHITECTURES)
def test_eabf_scales_the_logits_of_global_layers(architecture, tmp_path):
    config = config_of(architecture)
    settings = extension("eabf", config)
    extend_config(config, extension("abf", config))
    check_against_dense(architecture, settings, scaled, config, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(architecture, name, marks=[] if name == "dual_chunk" else pytest.mark.slow)
        for architecture in PATTERN_ARCHITECTURES
        for name in PATTERNS
    ],
)
def test_a_pattern_rotates_what_the_model_rotates(architecture, name, tmp_path):
    config = config_of(architecture)
    frequencies = plain(global_parameters(config)["rope_theta"], width_of(config))
    settings = extension(name, config)
    check_against_dense(architecture, settings, relocated(name, frequencies), config, tmp_path, zeroed=True)


@pytest.mark.parametrize("method", ["yarn", "llama3"])
def test_our_types_keep_the_frequencies_of_an_extended_model(method, tmp_path):
    """Dual Chunk with YaRN, and EABF on Llama 3.1's frequencies, each saved and loaded again."""
    config = config_of("llama")
    base = config.rope_parameters["rope_theta"]
    first = extension(method, config, original=4, target=ORIGINAL)
    extend_config(config, first)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "extended")
    frequencies, _ = formula(method, plain(base, 8), base=base, options=first, original=4)

    settings = extension("dual_chunk", config)
    backbone = load_backbone(ModelConfig(str(tmp_path / "extended"), context_extension=settings)).eval()
    changed = copy.deepcopy(config)
    changed._zeroed = True
    attend = relocated("dual_chunk", frequencies)  # the model multiplies queries and keys by the factor
    check_saved(backbone, reference(changed, backbone.base_model.state_dict(), attend), tmp_path / "pattern")

    backbone = load_backbone(
        ModelConfig(str(tmp_path / "extended"), context_extension=extension("eabf", config))
    ).eval()
    higher = copy.deepcopy(config)
    higher.rope_parameters["rope_theta"] = BASE
    higher._zeroed = False
    check_saved(backbone, reference(higher, backbone.base_model.state_dict(), scaled), tmp_path / "eabf")


@torch.no_grad()
def check_saved(backbone, expected, folder):
    backbone.base_model.save_pretrained(folder)
    for part in (backbone, load_backbone(ModelConfig(str(folder))).eval()):
        check_rotary(part.base_model)
        actual = part(pack_sequence([text()[0]]))[0, 1:]
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)


def test_the_base_of_eabf_grows_again(tmp_path):
    """The paper's Figure 11: EABF at 500k, fine-tuned, then at 2M; the scale keeps its length."""
    config = config_of("gemma3_text")
    extend_config(config, ContextExtension("eabf", ORIGINAL, TARGET, base=2e6))
    once = copy.deepcopy(config.rope_parameters)
    extend_config(config, ContextExtension("eabf", TARGET, 2 * TARGET, base=4e6))
    assert config.rope_parameters["full_attention"] == {**once["full_attention"], "rope_theta": 4e6}
    assert config.rope_parameters["sliding_attention"] == once["sliding_attention"]
    assert config.max_position_embeddings == 2 * TARGET


def test_a_nested_ramp_is_rounded_as_transformers_rounds_it():
    """YaRN reads ``truncate`` of flat parameters only, and an extension starts from what the model computes."""
    config = config_of("olmo3")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False}
    config.rope_parameters["full_attention"] |= yarn
    config.max_position_embeddings = 2048
    before = AutoModelForCausalLM.from_config(config).get_buffer("model.rotary_emb.full_attention_inv_freq")
    extend_config(config, ContextExtension("pi", 2048, 4096))
    after = AutoModelForCausalLM.from_config(config).get_buffer("model.rotary_emb.full_attention_inv_freq")
    torch.testing.assert_close(after, before / 2)


def test_models_that_ship_with_yarn():
    """GPT-OSS does not round YaRN's ramp, and the attention of DeepSeek V3 has a factor of its own."""
    config = tiny_config("gpt_oss")
    before = dict(config.rope_parameters)
    assert (before["rope_type"], before["factor"], before["truncate"]) == ("yarn", 32.0, False)
    extend_config(config, ContextExtension("yarn", 131072, 262144))
    assert config.rope_parameters == {**before, "factor": 64.0}
    config = tiny_config("deepseek_v3")
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    config.rope_parameters = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match="only 'yarn' and 'abf' can extend it further, not 'pi'"):
        extend_config(config, ContextExtension("pi", 163840, 327680))
    extend_config(config, ContextExtension("yarn", 163840, 327680))
    assert config.rope_parameters["factor"] == 80.0


@pytest.mark.parametrize(
    ("architecture", "method", "reason"),
    [
        ("cohere2", "yarn", REFUSED["cohere2"]),
        ("exaone4", "eabf", REFUSED["exaone4"]),
        ("llama4_text", "abf", REFUSED["llama4_text"]),
        ("gemma2", "rerope", REFUSED["gemma2"]),
        ("gpt_oss", "eabf", REFUSED["gpt_oss"]),
        ("deepseek_v3", "dual_chunk", REFUSED["deepseek_v3"]),
        ("glm4", "self_extend", REFUSED["glm4"]),
        ("phi3", "eabf", REFUSED["phi3"]),
        ("falcon", "abf", "was not compared"),
    ],
)
def test_what_is_not_supported_says_why(architecture, method, reason):
    config = tiny_config(architecture)
    message = f"'{method}' does not support '{architecture}', .*{reason}.*set `model_config.rope_parameters` yourself"
    with pytest.raises(ValueError, match=message):
        extend_config(config, ContextExtension(method, ORIGINAL, TARGET))


@pytest.mark.parametrize(
    ("present", "settings", "message"),
    [
        ("rerope", {"method": "yarn"}, "'yarn' cannot extend it further"),
        ("eabf", {"method": "dual_chunk"}, "'dual_chunk' cannot extend it further"),
        ("yarn", {"method": "dynamic_ntk"}, "'dynamic_ntk' cannot extend it further"),
        ("yarn", {"method": "xpos"}, "'xpos' is defined for plain RoPE"),
        ("dynamic_ntk", {"method": "yarn"}, "depends on the length of the text"),
        ("yarn", {"method": "yarn", "original_length": ORIGINAL}, "set `context_extension.original_length` = 16"),
    ],
)
def test_extensions_that_cannot_follow(present, settings, message):
    config = config_of("llama")
    extend_config(config, extension(present, config))
    with pytest.raises(ValueError, match=message):
        extend_config(config, {"original_length": TARGET, "target_length": 2 * TARGET, **settings})


@pytest.mark.parametrize(("present", "method"), [(None, "ntk"), (None, "dynamic_ntk"), ("pi", "ntk")])
def test_a_single_frequency_cannot_be_scaled_by_its_index(present, method):
    config = config_of("llama")
    config.head_dim = 2
    if present is not None:
        extend_config(config, ContextExtension(present, ORIGINAL // 2, ORIGINAL))
    with pytest.raises(ValueError, match=f"'{method}' .* rotate only 2 components, .*: use 'pi'"):
        extend_config(config, ContextExtension(method, ORIGINAL, TARGET))


@pytest.mark.parametrize("architecture", ["gemma3_text", "smollm3", "gpt_oss"])
def test_windows_that_cannot_be_removed(architecture):
    with pytest.raises(ValueError, match="full_attention: true` would change the rotation"):
        extend_config(config_of(architecture), ContextExtension("yarn", ORIGINAL, TARGET, full_attention=True))


def test_options_of_a_second_extension():
    config = config_of("llama")
    once = [frequency / FACTOR for frequency in plain(config.rope_parameters["rope_theta"], 8)]
    extend_config(config, extension("pi", config))
    options = {"beta_fast": 16.0, "beta_slow": 0.5, "attention_factor": 1.5}
    extend_config(config, ContextExtension("yarn", TARGET, 3 * TARGET, **options))
    twice = []
    for frequency in once:
        turns = TARGET * frequency / (2 * math.pi)
        kept = min(max(math.log(turns / 0.5) / math.log(16 / 0.5), 0.0), 1.0)
        twice.append(frequency * kept + frequency / 3 * (1 - kept))
    check_frequencies("llama", config, twice, 1.5)


def test_the_same_extension_is_not_applied_twice():
    for method, message in (
        ("pi", "extended from 16 tokens"),
        ("abf", "already the model's RoPE base"),
        ("eabf", "already the model's RoPE base"),
    ):
        config = config_of("llama")
        extended = ContextExtension.parse(extension(method, config))
        extend_config(config, extended)
        if method == "abf":  # of plain RoPE, which may have been trained with this base
            config.rope_parameters |= {"rope_type": "linear", "factor": 1.0}
            config.max_position_embeddings = 8
        with pytest.raises(ValueError, match=message):
            extend_config(config, extended)


def test_a_base_that_changes_nothing_is_reported(caplog):
    config = config_of("llama")
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    extend_config(config, {"method": "abf", "original_length": 16, "target_length": 64})
    assert "`context_extension.base` = 500000 is already the model's RoPE base" in caplog.text
    caplog.clear()
    extend_config(config_of("llama"), {"method": "abf", "original_length": 16, "target_length": 64})
    assert not caplog.records


@pytest.mark.parametrize("method", ["none", "abf", "eabf", "dual_chunk"])
def test_the_factor_that_follows_from_the_length_stays(method):
    """LongRoPE without an attention factor has one of the model's length, which an extension changes."""
    config = config_of("llama")
    config.max_position_embeddings = 64
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 8,
        "short_factor": [2.0] * 4,
        "long_factor": [2.0] * 4,
    }
    factor = rotary_class("llama")(config).attention_scaling
    assert factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(8)))
    options = {} if method in ("none", "dual_chunk") else {"base": 20000.0}
    extend_config(config, ContextExtension(method, 64, 256, **options))
    kept = config.rope_parameters.get("inner", config.rope_parameters)
    assert kept["attention_factor"] == pytest.approx(factor)


def test_nothing_of_a_model_that_switches_is_changed_by_none():
    config = config_of("phi3")
    config.max_position_embeddings, config.original_max_position_embeddings = 64, 16
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.rope_parameters = {**config.rope_parameters, **longrope, "original_max_position_embeddings": 16}
    before = rotary_class("phi3")(config)
    extend_config(config, ContextExtension("none", 64, 256))
    after = rotary_class("phi3")(config)
    assert config.original_max_position_embeddings == 16
    assert after.attention_scaling == before.attention_scaling


def test_the_original_length_of_the_first_extension_stays_beside_its_parameters():
    config = config_of("llama")
    config.original_max_position_embeddings = 8  # as some makers write it
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config.rope_parameters = {**config.rope_parameters, **yarn}
    extend_config(config, ContextExtension("yarn", 32, 64))
    assert config.original_max_position_embeddings == 8
    check_frequencies("llama", config, *formula("yarn", plain(1e4, 8), base=1e4, options={}, original=8, factor=8))


def test_a_yarn_with_its_own_attention_factor_is_extended_with_a_new_one():
    config = config_of("llama")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.5}
    config.rope_parameters = {**config.rope_parameters, **yarn}
    with pytest.raises(ValueError, match=r"set `context_extension\.attention_factor`"):
        extend_config(config, ContextExtension("yarn", 32, 64))
    extend_config(config, ContextExtension("yarn", 32, 64, attention_factor=1.7))
    assert (config.rope_parameters["factor"], config.rope_parameters["attention_factor"]) == (8.0, 1.7)


@pytest.mark.parametrize("method", ["eabf", "pi"])
def test_deepseek_keeps_the_factor_of_its_logits(method):
    config = config_of("deepseek_v3")
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
    config.rope_parameters = {**config.rope_parameters, **yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match="scales its logits by the factor of YaRN"):
        extend_config(config, ContextExtension(method, 640, 1280))
