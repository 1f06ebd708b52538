"""Entry point of the `longce` command, which imports torch only after the arguments are checked.

Imports are inside the functions, so that Ctrl-C during an import is also reported in one line.
"""

import logging
import multiprocessing
import re
import sys
import warnings
from collections.abc import Sequence

USAGE = """\
usage: longce COMMAND [OPTIONS]

Key-token long-context language modeling: measure with LongPPL, train with LongCE.

commands:
  quickstart  generate a corpus, train a tiny evaluator and fine-tune a tiny model with LongCE, all offline
  score       compute LongPPL and perplexity of a model on text files
  evaluate    evaluate a model on long-context tasks (RULER, LongEval, ..) and tasks of lm-evaluation-harness
  inspect     show the key tokens of a document, and its likelihoods in long and short context, as an HTML page
  fit         fine-tune a model and evaluate its LongPPL during training
  validate    evaluate a model on the validation documents
  test        evaluate a model on the test documents
  predict     write the long- and short-context log-likelihoods of every token of the test documents
  corpus      `corpus score`: score documents for long-range dependence; `corpus select`: choose them by these scores
  data        `data inspect`: show packed training sequences as text, with document boundaries
  influence   store an evaluator's LongCE token weights, or its losses for Rho-1, for training without a short pass
  compare     compare runs of `fit`, or results of `score`: final numbers, curves, costs and settings
  correlate   correlate LongPPL and perplexity of many models with their benchmark scores
  export      convert a checkpoint of `fit` into a folder that transformers loads
  reproduce   measure the paper's tables again: `table1` .. `table12`
  plan        estimate FLOPs, time and memory of `fit`, and what would fit, without weights or a GPU

`longce COMMAND --help` lists the options of a command; `longce --version` prints the version.
In several processes that restart after a crash: torchrun --nproc_per_node N --no_python longce COMMAND [OPTIONS]
LONGCE_TRACEBACK=1 shows where an error was raised."""

# A spawned worker, or one forked from a server, imports this module and unpickles its work without calling `main`.
if getattr(multiprocessing.current_process(), "_inheriting", False):
    from lightning_modules.utilities.user_modules import find_user_modules

    find_user_modules()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script.

    The exit status is 0 after success, 130 after Ctrl-C (1 for ``fit``), 143 after SIGTERM (0 for ``fit``), 2 for a
    user error, and 1 for any other error.
    """
    try:
        _run_command(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        sys.stderr.write("\nlongce: interrupted\n")
        sys.exit(130)


def _run_command(arguments: list[str]) -> None:
    import jsonargparse

    from lightning_modules.utilities.user_modules import user_modules
    from longce.cli.config_files import find_packaged_configs, read_configs, use_checked_yaml
    from longce.cli.early_keys import check_keys
    from longce.cli.errors import stop_with, stop_with_usage, suggest_nearest
    from longce.cli.hub import configure_hub
    from longce.cli.registry import COMMANDS, run_experiment

    _configure_messages()
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version

        sys.stdout.write(f"longce {version('longce')}\n")
        sys.exit(0)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + "\n")
        sys.exit(0 if arguments else 2)
    if arguments[0] not in COMMANDS:
        stop_with_usage(f"unknown command `{arguments[0]}`.{suggest_nearest(arguments[0], COMMANDS)}")
    try:
        use_checked_yaml()
        # Even an empty list makes jsonargparse enforce its own (`os`, `subprocess`, ..), as its version 5 always does.
        jsonargparse.set_parsing_settings(import_path_denylist=[])
        arguments = find_packaged_configs(arguments)
        read_configs(arguments)  # an error names the file
        if COMMANDS[arguments[0]] is run_experiment:
            check_keys(arguments)
        configure_hub()
        with user_modules():
            COMMANDS[arguments[0]](arguments)
    except Exception as error:
        stop_with(error)


def _configure_messages() -> None:
    """Print log messages and warnings as plain lines, and drop those of libraries that do not concern the user."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Transformers validates only its own RoPE types; ours are validated when they are made.
    logging.getLogger("transformers.modeling_rope_utils").addFilter(
        lambda record: "Missing validation function" not in record.getMessage()
    )
    for noisy in ("httpx", "httpx2", "datasets", "fsspec", "tensorboard"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_redirect_to_stderr)
    # bitsandbytes recommends a faster 4-bit kernel for CPUs, which hardly any run needs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in record.getMessage())
    # Lightning advertises other products at every start, reports TPUs, and repeats settings and checkpoints.
    noise = "Tip:|TPU available|was configured so 100%|Restoring states|Restored all states|Loaded model weights from"
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not re.search(noise, record.getMessage())
    )
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning calls a deprecated function of torch
    warnings.filterwarnings("ignore", message="The dirpath has changed")  # each run has its own
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # `Run` checks that


def _redirect_to_stderr(record: logging.LogRecord) -> bool:
    """Pass a record to the root logger: DeepSpeed's own handler writes to standard output, which is for results."""
    if "Setting accelerator to CPU" not in record.getMessage():
        logging.getLogger().handle(record)
    return False


if __name__ == "__main__":
    main()
