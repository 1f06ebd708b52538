"""Options of ``longce reproduce miniature``; importable without torch."""

from typing import Any


def add_miniature_options(parser: Any) -> None:
    """Add the options of ``longce reproduce miniature``."""
    output = "Folder for the models and the report; finished models there are reused."
    parser.add_argument("--output", type=str, default="runs/miniature", help=output)
    seeds = "Number of base models, each from different random weights; every experiment runs on each of them."
    parser.add_argument("--seeds", type=int, default=1, help=seeds)
    config = "YAML file of the experiments; by default configs/reproduce/miniature.yaml."
    parser.add_argument("--config", type=str | None, help=config)
    text = "Folder with train/*.txt and test/*.txt, for experiments on real text."
    parser.add_argument("--text", type=str | None, help=text)
