"""Render matplotlib figures in the project's style."""

import io
import re
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, NullFormatter

PANEL = (3.4, 2.7)
"""Width and height of a figure in inches: a phone shows this width at full size."""

DARK = {
    "#22211f": "#dcd9d2",
    "#e4e0d8": "#2e3136",
    "#1f5fa8": "#7db8f2",
    "#b04700": "#ff9d4d",
    "#1e6b40": "#6fcf97",
    "#8a3fa0": "#d6a0e8",
    "#00707f": "#4fd0e0",
    "#b3261e": "#ff8a80",
    "#7d6118": "#d9b95a",
    "#bd2d79": "#ff8fc7",
    "#5a5fb8": "#a5a8ff",
    "#67645e": "#9d9a93",
}
"""Colors on a dark screen of those that figures are drawn with."""

INK, LINE, *COLORS = DARK

STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "axes.prop_cycle": cycler(color=COLORS),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "longce",
}
"""Settings for ``matplotlib.rc_context``, both for drawing and for saving figures."""


def curves_as_svg(curves: Iterable[tuple[str, Any, Any]], *, x: str, y: str, log: bool = False) -> str:
    """Draw curves as SVG text: the legend, the x values and the y values of each.

    The y axis may be ``log``. A ring marks a curve's value at 0, which is that of the model before training.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        plot = figure.subplots()
        plot.set(xlabel=x, ylabel=y)
        for (name, xs, ys), line in zip(curves, cycle(("-", "--", "-.", ":")), strict=False):
            marker = "o" if len(xs) < 30 else ""
            (drawn,) = plot.plot(xs, ys, line, marker=marker, markersize=3, label=name)
            if len(xs) > 1 and not isinstance(xs[0], str) and xs[0] == 0:
                plot.plot(xs[0], ys[0], "o", color=drawn.get_color(), markersize=7, markerfacecolor="none")
        if not plot.xaxis.have_units():  # numbers, not names
            plot.locator_params("x", nbins=5)
        if log:
            plot.set_yscale("log")
            plot.yaxis.set(
                major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter=NullFormatter()
            )
        figure.legend(loc="outside upper left", ncols=2)
        return as_svg(figure)


_FONTS = re.compile(r"'DejaVu Sans'[^;\"]*")


@matplotlib.rc_context(STYLE)
def as_svg(figure: Figure) -> str:
    """Return a figure as SVG text, whose colors of `STYLE` become light on a dark screen."""
    stream = io.StringIO()
    figure.savefig(
        stream, format="svg", bbox_inches="tight", pad_inches=0.02, facecolor="none", metadata={"Date": None}
    )
    rules = ""
    for light, dark in DARK.items():
        for kind in ("fill", "stroke"):
            rules += f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
    style = f"<style>@media screen and (prefers-color-scheme:dark){{{rules}}}</style>"
    svg = _FONTS.sub("system-ui, 'Segoe UI', 'Noto Sans', sans-serif", stream.getvalue())
    return svg.replace("<defs>", f"{style}<defs>", 1)
