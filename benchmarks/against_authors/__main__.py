"""Compare time and memory of scoring and of a LongCE step with the code of the paper's authors.

Scoring is compared with the package of the paper's authors (`longppl` 0.3.0). It has no training step; the baseline of
the step is the same formula written as their training script has it: full logits of the row and of each window.
Both run in this process, in turn, on the same models and text, in float32; medians of the rounds. Without `--model`,
random Llamas read random words, and thresholds are quantiles of the evaluator's scores: 60 % of the tokens are
candidates (LCL > beta), as in text, and a tenth has LSD > alpha. A real model reads a real text with the thresholds of
the paper (alpha 2, beta -2). A baseline that would not fit into memory is left out, and so is its ratio.

    python -m benchmarks.against_authors --lengths 4096 8192 --vocabularies 32000 128256 --rounds 3
    python -m benchmarks.against_authors --shape D --lengths 2048 --vocabularies 8000 --context_length 512 --stride 128
    python -m benchmarks.against_authors --model MODEL.gguf --text report.txt --stride 512 --rounds 1
"""

import argparse
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from benchmarks.against_authors.subjects import SHAPES, Setting, Subject, load_reader, random_subject, real_subject
from benchmarks.against_authors.tables import HEAD, floor_rows, growth, rows
from benchmarks.against_authors.work import KINDS, SIDES, Run, compare


def main() -> None:
    """Print the tables."""
    options = _parser().parse_args()
    transformers.logging.set_verbosity_error()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    machine = f"{torch.get_num_threads()} threads, {platform.machine()}, float32, {options.rounds} round(s)"
    thresholds = "quantiles as thresholds" if options.model is None else f"alpha {options.alpha}, beta {options.beta}"
    print(f"{versions}, {machine}, {thresholds}\n")
    print(HEAD)
    table: dict[Setting, dict[str, dict[str, Run]]] = {}
    floors: list[str] = []
    try:
        for subject, setting in _subjects(options):
            table[setting] = {}
            for kind, runs in compare(subject, setting, options.rounds, options.what, options.sides):
                table[setting][kind] = runs
                print("\n".join(rows(setting, {kind: runs})), flush=True)
            floors += ["", *floor_rows(subject, setting, table[setting])] if options.floor else []
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("\n" + "\n".join([*growth(table), *floors]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_authors", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="hub id, folder or GGUF file; by default random Llamas")
    parser.add_argument("--evaluator", help="as --model; by default the model, in a separate pass")
    parser.add_argument("--text", type=Path, nargs="+", help="text files, joined and cut to the length, for --model")
    parser.add_argument("--alpha", type=float, default=2.0, help="threshold of LSD, for --model")
    parser.add_argument("--beta", type=float, default=-2.0, help="threshold of LCL, for --model")
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000])
    parser.add_argument("--context_length", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    parser.add_argument("--floor", action="store_true", help="also the FLOP floor at this machine's measured rates")
    return parser


def _subjects(options: argparse.Namespace) -> Iterator[tuple[Subject, Setting]]:
    """Yield what is measured, one setting after another."""
    sizes = (options.context_length, options.stride)
    if options.model is None:
        for vocabulary in options.vocabularies:
            for length in options.lengths:
                setting = Setting(options.shape, vocabulary, length, *sizes)
                yield random_subject(setting), setting
        return
    if not options.text:
        raise ValueError("a real model needs a real text: --text FILE ..")
    reader = load_reader(options.model)
    evaluator = load_reader(options.evaluator) if options.evaluator else reader
    name = Path(options.model).stem if options.model.endswith(".gguf") else Path(options.model).name
    for length in options.lengths:
        setting = Setting(name, reader.model.config.vocab_size, length, *sizes)
        yield real_subject(reader, evaluator, options.text, length, (options.alpha, options.beta)), setting


if __name__ == "__main__":
    main()
