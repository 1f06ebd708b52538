"""Command line of the benchmarks on real models: ``python -m benchmarks.real_models fetch FOLDER``, and the studies."""

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.real_models.fetch import MODELS, fetch
from benchmarks.real_models.picture import choose_token, describe_key_tokens, save_pictures
from benchmarks.real_models.study import Study
from benchmarks.real_models.tokens import describe_tokens
from lightning_modules.utilities.text_files import read_text
from lightning_modules.visualization.page import inspect_document
from longce.inspect import read_row

STUDIES = {
    "anatomy": "Which tokens of real text are key, and how far evaluators and settings agree.",
    "correlate": "Whether LongPPL predicts accuracy on long-context questions, and perplexity does not.",
    "extend": "How SmolLM2 reads beyond its 8,192 positions, by each method of context extension.",
    "extend_gemma": "The same for Gemma 3 270M beyond its 32,768 positions, on one book.",
    "extend_qwen": "The same for Qwen2.5-Coder 0.5B beyond its 32,768 positions, on that book.",
    "fine_tune": "Whether LongCE pays on SmolLM2 and books, after equal steps and equal CPU time.",
    "fine_tune_8k": "The same on rows of 8,192 tokens, after equal steps and equal time, for a GPU.",
}


def main() -> None:
    """Run a part of the benchmarks; errors are one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    download = parts.add_parser("fetch", help="Download models as GGUF files, without a hub.")
    download.add_argument("folder", type=Path, help="Folder for the files; those that are there are kept.")
    download.add_argument("models", nargs="*", metavar="MODEL", help=f"By default all: {', '.join(MODELS)}.")
    for name, purpose in STUDIES.items():
        add_study_options(parts.add_parser(name, help=purpose))
    add_picture_options(
        parts.add_parser("picture", help="Make the README's picture and its page, and count the key tokens.")
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.part == "fetch":
            fetch(options.folder, options.models or list(MODELS))
        elif options.part == "picture":
            make_pictures(options)
        else:
            study = Study(options.models, options.data, options.work, device=options.device)
            getattr(study, options.part)()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a study, which resumes if its folders are the same."""
    parser.add_argument("--models", type=Path, required=True, help="Folder that `fetch` wrote.")
    parser.add_argument("--data", type=Path, required=True, help="Folder with govreport, pg19, pile-arxiv, haystack.")
    parser.add_argument("--work", type=Path, required=True, help="Folder for what has been scored.")
    parser.add_argument(
        "--device", default="cpu", help="Device of the models, such as cuda; `fine_tune` times steps on the CPU."
    )


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``picture``."""
    parser.add_argument("--evaluator", required=True, help="Hub id, folder or GGUF file of the evaluator.")
    parser.add_argument("--text", required=True, help="Text file, or a .jsonl or .parquet file with `--row`.")
    parser.add_argument("--row", type=int, help="Line or row of the document, from 0.")
    parser.add_argument("--text_column", default="text", help="Field or column of the text, with `--row`.")
    parser.add_argument("--context_length", type=int, default=1024, help="Shortest short context, in tokens.")
    parser.add_argument("--stride", type=int, default=512, help="Tokens that share one short window.")
    parser.add_argument("--alpha", type=float, default=2.0, help="Key tokens have a larger LSD, in nats.")
    parser.add_argument("--beta", type=float, default=-2.0, help="Key tokens have a larger LCL, in nats.")
    parser.add_argument("--max_tokens", type=int, help="Maximum number of tokens of the document.")
    parser.add_argument("--token", type=int, help="Key token to show; by default the most instructive one.")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/images"), help="Folder for the page and its pictures."
    )


def make_pictures(options: argparse.Namespace) -> None:
    """Score the document, save its pictures, and print its figures and the counts of its key tokens."""
    row, file = options.row, options.text
    name, text = (Path(file).name, read_text(file)) if row is None else read_row(file, row, options.text_column)
    settings = {key: getattr(options, key) for key in ("context_length", "stride", "alpha", "beta", "max_tokens")}
    inspection = inspect_document(text, options.evaluator, name=name, **settings)
    longest_short = options.context_length + options.stride - 1
    tokens = describe_tokens(inspection.text, inspection.scores, alpha=options.alpha, beta=options.beta)
    token = choose_token(tokens, longest_short) if options.token is None else options.token
    shown = tokens[tokens["key"] & (tokens["token"] == token)]
    if shown.empty:
        raise ValueError(f"Token {token} is not a key token of '{inspection.name}'.")
    paths = save_pictures(inspection, token, options.output)
    sys.stdout.write(f"{inspection.summary()}\n{describe_key_tokens(tokens, longest_short)}\n")
    found = shown.iloc[0]
    sys.stdout.write(f"shown: token {token} of '{found['word']}', last used {found['distance']:.0f} tokens before\n")
    sys.stdout.writelines(f"{path} ({path.stat().st_size / 1e3:.0f} kB)\n" for path in paths)


if __name__ == "__main__":
    main()
