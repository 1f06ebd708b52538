"""Real models, each fetched and converted once into the folder of `LONGCE_REAL_MODELS`, and texts for them."""

import functools
import os
from pathlib import Path

import pytest

from benchmarks.real_models.fetch import fetch
from lightning_modules.models.loading.gguf.conversion import convert_gguf
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.score import score
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.utilities.locks import exclusive

NAMES = {"smollm2": "smollm2-135m", "gemma": "gemma-3-270m", "qwen": "qwen2.5-coder-0.5b"}
"""Models by what the tests call them; tests of all but the first are release tests."""

STORY = (
    "图书馆管理员陈丽华在旧书里发现了一张地图🗺️、上面写着「龙门客栈」。👩‍👩‍👧‍👦 家族の友人である田中さんは、"
    "その地図を見て驚いた😮。“三天后我们去龙门客栈吧🐉。”陈丽华说。한국에서 온 친구 민준도 함께 가기로 했다 🇰🇷🎉。\n"
    "路上下了很大的雨☔、他们在桥边等了两个小时。民宿の主人は温かいお茶🍵と餃子🥟を出してくれた。\n"
)
"""Chinese, Japanese and Korean with emoji. Told twice, it has key tokens."""

WINDOWS = {"context_length": 64, "stride": 64}
THRESHOLDS = {"alpha": 1.0, "beta": -4.0}


@functools.cache
def _convert(place, name):
    """The folder of a model, or why there is none."""
    try:
        with exclusive(place / name):  # another process of the same run may fetch it as well
            (file,) = fetch(place, [name])
    except ValueError as error:
        return str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGCE_CACHE", str(place / "converted"))
        return convert_gguf(file)


@pytest.fixture(scope="session")
def real_model():
    """A function that returns the folder of a model, or skips the test if the model cannot be had."""

    def folder(name):
        place = os.environ.get("LONGCE_REAL_MODELS")
        if not place:
            pytest.skip("LONGCE_REAL_MODELS names no folder for real models")
        Path(place).mkdir(parents=True, exist_ok=True)
        if isinstance(found := _convert(Path(place), NAMES[name]), str):
            pytest.skip(found)
        return found

    return folder


@pytest.fixture(scope="session")
def model(real_model):
    """SmolLM2's folder."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def license_text():
    return (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")


@pytest.fixture(scope="session")
def mixed_text(tmp_path_factory, license_text):
    """A file with a document of several scripts, half of which is a repetition."""
    path = tmp_path_factory.mktemp("texts") / "mixed.txt"
    path.write_text(f"{STORY}\n{license_text[2400:2700]}\n\n{STORY}", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def measure(real_model, tmp_path_factory):
    """A function for the record of `longce score` and the evaluator's scores; each evaluator scores a text once."""
    settings = {"cache_dir": str(tmp_path_factory.mktemp("evaluators")), "dtype": "float32", **WINDOWS, **THRESHOLDS}

    def run(text, model, evaluator, rule="paper", **options):
        names = str(real_model(model)), str(real_model(evaluator))
        (found,) = score(str(text), *names, key_token_rule=rule, **settings, **options)
        tokenizer = options.get("evaluator_tokenizer")
        config = EvaluatorConfig(names[1], key_token_rule=rule, tokenizer=tokenizer, **settings)
        return found, open_evaluator(config).scores(text.read_text("utf-8"))

    return run
