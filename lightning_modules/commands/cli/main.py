"""The command line: `main`, which imports what a command needs once its words are checked."""

import logging
import multiprocessing
import sys
import warnings
from collections.abc import Sequence

from lightning_modules.commands.cli.config_files import check_config_files, rename_old_paths, use_checked_yaml
from lightning_modules.commands.cli.errors import stop_with
from lightning_modules.commands.cli.registry import COMMANDS, run_experiment
from lightning_modules.utilities.orphans import end_with_launcher
from lightning_modules.utilities.user_modules import find_user_modules, user_modules

USAGE = """\
usage: longce COMMAND [OPTIONS]

Key-token long-context language modelling: LongPPL to measure, LongCE to train.

commands:
  quickstart  make a corpus, train a tiny evaluator and fine-tune a tiny model with LongCE, all offline
  score       LongPPL and perplexity of text files, by a model and an evaluator
  evaluate    scores of any model on long-context tasks (RULER, LongEval, ..) and on those of lm-evaluation-harness
  inspect     one HTML page of a document: key tokens, and what both contexts say of each token
  fit         fine-tune a model, evaluated by LongPPL as it trains
  validate    evaluate a model on the validation documents
  test        evaluate a model on the test documents
  predict     score documents: a corpus into a table (`configs/score_corpus.yaml`), or every token of the test documents
  select      the documents of a scored corpus that pass conditions, as ids or text, and weights of their sources
  data        `data inspect`: what the training rows hold, as text, with document boundaries
  influence   LongCE weights of the training rows by an evaluator, so that training makes no short pass
  correlate   LongPPL and perplexity of many models against their benchmark scores
  export      a checkpoint of `fit` as a folder that transformers loads
  reproduce   the paper's experiments: `miniature` with tiny models, `table1` .. `table12` with real ones (`--list`)
  launch      any of these commands in several processes, which are restarted after a crash
  plan        FLOPs, time, memory and cost of `fit` and of scoring on given GPUs, without weights or a GPU

`longce COMMAND --help` explains the options of each."""

# A worker that is spawned, or forked from a server, imports the main program and unpickles its work, without `main`.
if getattr(multiprocessing.current_process(), "_inheriting", False):
    find_user_modules()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script; it exits with 0 after success, 2 for what the user can fix, 1 for the rest."""
    end_with_launcher()
    arguments = [rename_old_paths(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    _set_up_messages()
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + "\n")
        sys.exit(0 if arguments else 2)
    if arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        sys.stderr.write(f"longce: error: no command '{arguments[0]}'.\n\n{USAGE}\n")
        sys.exit(2)
    try:
        use_checked_yaml()
        check_config_files(arguments)
        with user_modules():
            COMMANDS.get(arguments[0], run_experiment)(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\nlongce: interrupted\n")
        sys.exit(130)
    except Exception as error:
        stop_with(error)


def _set_up_messages() -> None:
    """Plain lines for people: ours, and of others what concerns them."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # It checks the settings of its own RoPE types only; ours are checked where they are made.
    logging.getLogger("transformers.modeling_rope_utils").addFilter(
        lambda record: "Missing validation function" not in record.getMessage()
    )
    for noisy in ("httpx", "httpx2", "datasets", "fsspec", "tensorboard"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_to_stderr)
    # A faster kernel for 4-bit weights on CPUs, which hardly any run has.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in record.getMessage())
    # Lightning advertises other products at every start.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's use of torch
    warnings.filterwarnings("ignore", message="The dirpath has changed")  # each run has its own
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # `Run` checks that


def _to_stderr(record: logging.LogRecord) -> bool:
    """DeepSpeed's own handler writes to standard output, which is for results."""
    if "Setting accelerator to CPU" not in record.getMessage():
        logging.getLogger().handle(record)
    return False


if __name__ == "__main__":
    main()
