"""Each `longce` command of README.md and the first ones of every page, and all blocks of Python, run as by a reader.

Where they name what only a reader has (models on the hub, texts, a cluster) the tables below say what stands in for
it. A new command needs a line in `COMMANDS`, or the test says so.
"""

import contextlib
import io
import json
import math
import re
import shlex
import sys
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longce.cli.main import main
from tests.conftest import make_text
from tests.support.pages import PAGES, ROOT, blocks, stand_in
from tests.support.readers import EXPERIMENT, LONGER_THAN_THE_MODEL, write_corpus

README = ROOT / "README.md"

WORDS = {  # what stands in a command, and what stands in for it; folders and files are made by `reader`
    "mistralai/Mistral-7B-v0.1": "model",
    "meta-llama/Llama-3.1-8B": "evaluator",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "model",
    "google/gemma-3-270m": "evaluator",
    "models/smollm2-135m.gguf": "model",
    "models/gemma-3-270m.gguf": "evaluator",
    "notebooks/constitution.txt": "report1.txt",
    "report*.txt": "report1.txt report2.txt",
    "--model M": "--model model",
    "--evaluator E": "--evaluator evaluator",
    "key_token_ratio > 0.02 and tokens >= 32768": "key_token_ratio >= 0 and tokens >= 64",
    "-c ..": "-c experiment.yaml",
    "..": "-c configs/base.yaml -c experiment.yaml",
}


class Reading(NamedTuple):
    """How a command is run, and what shows that it did what the page says.

    Attributes:
        more: Options that make it small, or complete what the page leaves out.
        prints: What its output must have, as a regular expression.
        makes: Files that must be there afterwards, as patterns.
        logs: What TensorBoard must show of the run.
        elsewhere: Another test that runs it, in this file: of what takes more than a few seconds.
    """

    more: str = ""
    prints: str = ""
    makes: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    elsewhere: str = ""


SCORED = r"(?s)LongPPL .*perplexity.*corpus of"
RUN = "runs/longce/VERSION"
CHECKPOINT = f"{RUN}/checkpoints/last.ckpt"
TRAINED = Reading(
    makes=("runs/longce/*/config.yaml", "runs/longce/*/checkpoints/last.ckpt"),
    logs=("train/loss", "train/weight_mean", "val/longppl", "val/perplexity"),
)
SERVED = Reading(elsewhere="tests/lightning_modules/scoring/test_served.py")
SHORT = "--context_length 32 --stride 16"
QUESTIONS = "--tasks passkey --lengths 512 --samples 1 --device cpu"
SCORE_CORPUS = Reading(f"{SHORT} --dtype float32 --device cpu", "documents with", ("scores/*.parquet",))

COMMANDS = {
    # README.md
    "longce quickstart": Reading(elsewhere="tests/longce/test_quickstart.py"),
    "longce score report.txt --model M --evaluator E": Reading(prints=SCORED),
    "longce score notebooks/constitution.txt --model models/smollm2-135m.gguf --evaluator models/gemma-3-270m.gguf"
    " --max_tokens 2048 --context_length 512 --stride 256 --dtype float32": Reading(prints=SCORED),
    "longce fit -c configs/base.yaml -c configs/experiments/longce_pg19.yaml": TRAINED._replace(
        more="-c experiment.yaml"
    ),
    "longce fit .. -c configs/experiments/longlora.yaml": TRAINED,
    "longce fit -c configs/base.yaml -c configs/experiments/longce_pg19.yaml -c configs/experiments/pose.yaml": Reading(
        "-c configs/debug.yaml", makes=("runs/longce/*/config.yaml",), logs=("train/loss", "val/perplexity")
    ),
    "longce fit .. -c configs/strategies/fsdp.yaml": TRAINED._replace(more="-c experiment.yaml"),
    "longce export": Reading(
        f"{CHECKPOINT} exported", "exported", ("exported/model.safetensors", "exported/README.md")
    ),
    "longce data inspect -c ..": Reading(prints=r"(?s)sequences of 128 tokens.*\nsequence 0"),
    "longce plan -c .. --gpu H200": Reading("", "(?s)LongCE.*GiB"),
    "longce fit .. --model my_module.TopLayers": Reading(elsewhere="tests/docs/test_customize.py"),
    "longce corpus score corpus --model M --output scores": SCORE_CORPUS,
    "longce corpus select scores": Reading(prints="(?s)documents"),
    "longce inspect report.txt --evaluator E": Reading(SHORT, "report.txt.html", ("report.txt.html",)),
    "longce evaluate --model M --output runs/m": Reading(QUESTIONS, "passkey", ("runs/m/answers.parquet",)),
    "longce correlate scores.parquet scores.csv --output runs/c": Reading(
        prints="(?s)Pearson.*longppl|longppl.*Pearson", makes=("runs/c/correlation.json", "runs/c/report.html")
    ),
    "longce compare runs/longce/version_0 runs/longce/version_1 --output page.html": Reading(
        elsewhere="tests/longce/compare/test_compare.py"
    ),
    "longce score .. --evaluator http://127.0.0.1:8000": SERVED,
    "longce reproduce table5": Reading(elsewhere="tests/benchmarks/reproduction/tables/test_command.py"),
    "longce reproduce --list": Reading(prints="table5-package"),
    "longce --help": Reading(prints="usage: longce COMMAND"),
    # First commands of the pages
    "longce score report*.txt --model HuggingFaceTB/SmolLM2-135M-Instruct --model google/gemma-3-270m --evaluator"
    " google/gemma-3-270m --max_tokens 2048 --context_length 512 --stride 256 --add_special_tokens true --output"
    " scores.parquet": Reading("", "(?s)bits.*/byte.*corpus of.*bits/byte", ("scores.parquet",)),
    "longce data inspect -c configs/base.yaml -c experiment.yaml --rows 0 7": Reading(
        prints=r"(?s)\nsequence 0.*sequence 7"
    ),
    f"longce export {RUN} DIR": Reading("", "DIR", ("DIR/model.safetensors",)),
    "longce evaluate --model mistralai/Mistral-7B-v0.1 --tasks ruler_synthetic longeval --lengths 4096 8192 16384"
    " --samples 20 --output runs/mistral": Reading(QUESTIONS, "passkey", ("runs/mistral/report.html",)),
    "longce corpus score 'corpus/*.parquet' --model mistralai/Mistral-7B-v0.1 --columns source --output"
    " scores": SCORE_CORPUS,
    'longce corpus select scores --where "key_token_ratio > 0.02 and tokens >= 32768" --by source --output'
    " chosen.jsonl": Reading(prints="source"),
    **{
        f"longce fit -c .. {options}": Reading(elsewhere="tests/docs/test_customize.py")
        for options in (
            "--model.objective my_objective.Threshold",
            "--data my_data.Texts --data.files 'books/*.txt' --data.tokenizer_name meta-llama/Llama-2-7b-hf",
            "--model my_module.TopLayers --model.layers 4",
            "--trainer.callbacks+ my_metric.LatePerplexity --trainer.callbacks.position 16384",
        )
    },
    "longce plan -c configs/base.yaml -c configs/experiments/longce_pg19.yaml --gpu H200 --gpus 8": Reading(
        "-c experiment.yaml", "(?s)LongCE.*GiB"
    ),
}


def commands(page, *, first_only=False):
    """The `longce` commands of a page as it has them, in blocks and in lines of text, without comments."""
    text = page.read_text()
    found = blocks(page, "bash")[:1] if first_only else blocks(page, "bash")
    lines = "".join(found).replace("\\\n", " ").splitlines()
    lines += [] if first_only else re.findall(r"`(longce [^`]*)`", text)
    for line in lines:
        if (command := re.search(r"(?:^|[\s/])(longce .*)$", line.partition(" #")[0])) is not None:
            yield " ".join(command[1].split())


def all_commands():
    """Each command once. Those that are run are slow: the tests of its folder try the same work with less."""
    found = [command for page in PAGES for command in commands(page, first_only=page != README)]
    for command in dict.fromkeys(found):
        if "COMMAND" not in command:
            reading = COMMANDS.get(command)
            marks = [] if reading is None or reading.elsewhere else [pytest.mark.slow]
            yield pytest.param(command, id=command[:60], marks=marks)


@pytest.fixture(scope="module")
def scored(tmp_path_factory, corpus, model_dir):
    """A corpus and its scores."""
    folder = tmp_path_factory.mktemp("scored")
    write_corpus(folder / "corpus", corpus)
    with contextlib.chdir(folder):
        longce(f"corpus score corpus --model {model_dir} --columns source --output scores {SCORE_CORPUS.more}")
    return folder / "scores"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """A checkpoint, as `longce fit` leaves it in `VERSION`."""
    folder = tmp_path_factory.mktemp("trained")
    configs = ROOT / "configs"
    words = f"fit -c {configs}/base.yaml -c {configs}/debug.yaml -c checkpoints.yaml --trainer.max_steps 1"
    with contextlib.chdir(folder):
        (folder / "checkpoints.yaml").write_text(
            yaml.safe_dump({"trainer": {"callbacks": EXPERIMENT["trainer"]["callbacks"][:1]}})
        )
        longce(f"{words} --trainer.logger.init_args.version VERSION")
    return folder / "runs"


def longce(words):
    """Run a command in this process and return what it printed; `--help` leaves by SystemExit."""
    status, before = 0, sys.argv
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(shlex.split(words))
        except SystemExit as stopped:
            status = stopped.code
        finally:
            sys.argv = before
    assert status in (0, None), f"`longce {words}` ended with exit status {status}."
    return out.getvalue()


@LONGER_THAN_THE_MODEL
@pytest.mark.parametrize("command", list(all_commands()))
@pytest.mark.filterwarnings("ignore:.*no key token")  # the models are random
def test_command(command, reader, request):
    reading = COMMANDS.get(command)
    if reading is None:
        pytest.fail(f"No line in COMMANDS of {__name__} says how to run the new command `{command}`.")
    if reading.elsewhere:
        words = ", ".join(f'"{word}"' for word in shlex.split(command)[1:3] if word.isalpha())
        assert f"main([{words}," in (ROOT / reading.elsewhere).read_text()
        return
    if RUN in command + reading.more:
        (reader / "runs").symlink_to(request.getfixturevalue("trained"))
    if command.startswith("longce corpus select"):
        (reader / "scores").symlink_to(request.getfixturevalue("scored"))
    words = stand_in(command.removeprefix("longce "), WORDS)
    output = longce(f"{words} {reading.more}")
    assert re.search(reading.prints, output), output[-2000:]
    for pattern in reading.makes:
        assert list(reader.glob(pattern)), f"`{command}` made no {pattern}."
    if reading.logs:
        events = EventAccumulator(str(next(reader.glob("runs/longce/*"))))
        assert set(events.Reload().Tags()["scalars"]) >= set(reading.logs)


def python_blocks():
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, "python"))
    ]


def given():
    """What a block of Python takes for granted."""
    long = torch.tensor([[0.0, -0.5, -3.0, -0.1]])
    return {"long": long, "short": long - torch.tensor([[0.0, 3.0, 3.0, 0.0]]), "log_likelihood": long}


@LONGER_THAN_THE_MODEL
@pytest.mark.parametrize("block", python_blocks())
def test_python_block(block, reader):
    names = given()
    quoted = {f'"{word}"': f'"{replacement}"' for word, replacement in WORDS.items() if "/" in word}
    for word, replacement in quoted.items():
        block = block.replace(word, replacement)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, "page", "exec"), names)  # our own pages
    if "print(" in block:
        assert re.search(r"\d", out.getvalue())
    if "longppl" in names:
        assert float(names["longppl"]) == pytest.approx(math.exp(0.5))  # of the one key token


CLOSED_LOOP = {  # as in the page, and for a tiny model and short documents
    "mistralai/Mistral-7B-v0.1": "model",
    "key_token_ratio > 0.01 and benefit_mean > 0 and tokens >= 32768": "key_token_ratio >= 0 and benefit_mean > -9 and"
    " tokens >= 64",
    "--data.sequence_length 32768": "--data.sequence_length 64",
}


@pytest.mark.slow
@LONGER_THAN_THE_MODEL
@pytest.mark.filterwarnings("ignore:.*no key token")
def test_the_script_from_raw_files_to_a_trained_model(reader):
    (reader / "raw").mkdir()
    made = [make_text(90, seed) for seed in range(30)]
    for source, texts in {"books": made[:20], "reports": [*made[20:], made[20], " "]}.items():
        lines = [json.dumps({"text": text, "source": source}) + "\n" for text in texts]
        (reader / "raw" / f"{source}.jsonl").write_text("".join(lines))
    script = next(block for block in blocks(ROOT / "docs" / "curate.md", "bash") if block.startswith("MODEL="))
    words = stand_in(script.replace("\\\n", " "), CLOSED_LOOP)
    small = "--trainer.accelerator cpu --trainer.devices 1 --model.context_length 32 --model.stride 16"
    more = {"corpus score": SCORE_CORPUS.more, "corpus select": "", "fit -c": small}
    more["fit -c"] += " --trainer.precision 32-true --trainer.val_check_interval 20 --data.validation_length 64"
    _, *commands = words.replace("$MODEL", "model").strip().splitlines()
    for command in commands:
        words = command.removeprefix("longce ")
        longce(f"{words} {more[' '.join(words.split()[:2])]}")
    assert (reader / "chosen.svg").is_file()
    assert len(pq.read_table(reader / "chosen.parquet")) == 30, "each text once, and not the blank one"
    assert (reader / next(reader.glob("runs/longce/*/checkpoints/*step-20*"))).exists()
