"""Import what trainings and scoring need, before other processes are forked from this one (`tests.support.forks`)."""

import contextlib
import io
import sys
import threading

import peft  # noqa: F401
import torch
import torch.utils.tensorboard
from tqdm import tqdm

import longce.cli.lightning_cli
import longce.corpus.score  # noqa: F401
from longce.cli.main import main
from tests.support.pages import ROOT

torch.set_num_threads(1)
tqdm.set_lock(threading.RLock())  # the default is shared with all forked processes: a kill would keep it
# The first parser of the options of a training takes a CPU second longer than others.
sys.argv = ["longce", "fit"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["fit", "-c", str(ROOT / "configs/base.yaml"), "-c", str(ROOT / "configs/debug.yaml"), "--print_config"])
