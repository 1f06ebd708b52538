"""Render matplotlib figures in the project's style."""

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}
"""Settings for ``matplotlib.rc_context``, both for drawing and for saving figures."""


@matplotlib.rc_context(STYLE)
def as_svg(figure: Figure) -> str:
    """Return a figure as SVG text."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()
