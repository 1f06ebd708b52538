"""Render matplotlib figures in the project's style, as SVG and as pixels."""

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}
"""Settings for ``matplotlib.rc_context``, both for drawing and for saving figures."""


@matplotlib.rc_context(STYLE)
def as_svg(figure: Figure) -> str:
    """Return a figure as SVG text."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()


@matplotlib.rc_context(STYLE)
def as_pixels(figure: Figure) -> NDArray[np.uint8]:
    """Return a figure as ``[height, width, 3]`` red, green and blue."""
    figure.set_dpi(110)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
