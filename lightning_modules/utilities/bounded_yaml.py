"""YAML whose aliases cannot expand without end."""

from typing import Any

import yaml

MAX_VALUES = 100_000
"""Limit of the values of a file after its aliases are expanded. A file of ten lines can expand to billions."""


def load_yaml(text: str) -> Any:
    """Load YAML safely; raise a ``yaml.YAMLError`` if its aliases expand to more than `MAX_VALUES` values."""
    check_expansion(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.safe_load(text)


def check_expansion(node: yaml.Node | None) -> None:
    """Raise a ``yaml.YAMLError`` if a document's aliases expand to more than `MAX_VALUES` values, or to themselves."""
    sizes: dict[int, float] = {}
    # Without aliases, there are as many values as nodes.
    if node is not None and _count_values(node, sizes) > max(MAX_VALUES, len(sizes)):
        raise yaml.YAMLError(
            f"its aliases (`*name`) expand to more than {MAX_VALUES:,} values. Write fewer, or without aliases."
        )


def _count_values(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Count the values of a node; ``sizes`` has those of earlier nodes, so that each is visited once."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")  # of a node inside of itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
        sizes[id(node)] = 1 + sum(_count_values(each, sizes) for pair in pairs for each in pair)
    return sizes[id(node)]
