"""Figures over the tokens of all documents, as images."""

from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightning_modules.visualization.tensorboard.sums import (
    LCL_EDGES,
    LSD_EDGES,
    SHORTEST_FITTED,
    BenefitCounts,
    PositionSums,
)

_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_DOTS_PER_INCH = 110


def benefit_figure(benefit: BenefitCounts, *, alpha: float, beta: float, title: str) -> np.ndarray:
    """Draw the density of tokens by LSD and LCL, with histograms and thresholds, as ``[height, width, 3]`` uint8."""
    counts, lsd, lcl = benefit.counts.numpy(), LSD_EDGES.numpy(), LCL_EDGES.numpy()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 5.2), dpi=_DOTS_PER_INCH)
        figure.subplots_adjust(left=0.1, right=0.98, bottom=0.1, top=0.94, wspace=0.05, hspace=0.08)
        axes = figure.subplots(
            2, 2, sharex="col", sharey="row", width_ratios=(4, 1), height_ratios=(1, 3), squeeze=False
        )
        axes[0, 1].axis("off")
        above, main, beside = axes[0, 0], axes[1, 0], axes[1, 1]
        drawn = np.ma.masked_equal(counts, 0)
        norm = LogNorm(vmin=1, vmax=max(counts.max(), 2))
        main.pcolormesh(lsd, lcl, drawn, norm=norm, cmap="viridis_r", rasterized=True)
        above.stairs(counts.sum(0), lsd, fill=True, color="0.7")
        beside.stairs(counts.sum(1), lcl, fill=True, color="0.7", orientation="horizontal")
        above.set(yscale="log", ylabel="tokens", title=title)
        beside.set(xscale="log", xlabel="tokens")
        for axis in (above, main):
            axis.axvline(alpha, color="C3", lw=1, ls="--")
        for axis in (main, beside):
            axis.axhline(beta, color="C3", lw=1, ls="--")
        main.text(lsd[-1], 0.3, f"key tokens: LSD > {alpha:g}, LCL > {beta:g} ", ha="right", va="bottom", color="C3")
        main.set(xlabel="LSD: long minus short log-likelihood (nats)", ylabel="LCL: long log-likelihood (nats)")
        main.set_ylim(lcl[0], 0.25)
        return _pixels(figure)


def position_figure(
    positions: PositionSums, *, title: str, short: int | None = None, key_share: int | None = None
) -> np.ndarray:
    """Draw the loss by the length of the context, with its power law, as ``[height, width, 3]`` uint8.

    Value 0 of the positions is the loss in nats; ``short`` and ``key_share`` are the indices of the loss in the short
    context and of the fraction of key tokens, if there are any.
    """
    means, fit = positions.means().numpy(), positions.fit()
    with matplotlib.rc_context(_STYLE):
        panels = 1 if key_share is None else 2
        figure = Figure(figsize=(6.4, 3.4 + 1.4 * (panels - 1)), dpi=_DOTS_PER_INCH)
        # Not matplotlib's automatic layout, which takes longer than all of the drawing.
        figure.subplots_adjust(left=0.11, right=0.98, bottom=0.14 if panels == 1 else 0.1, top=0.92, hspace=0.08)
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=(3, 1)[:panels])[:, 0]
        axes[0].plot(means[0], means[1], "o-", color="C0", lw=1, markersize=4, label="long context")
        if short is not None:
            axes[0].plot(means[0], means[1 + short], "s--", color="C1", lw=1, markersize=3, label="short context")
        if fit is not None:
            smooth = np.geomspace(SHORTEST_FITTED, means[0, -1], 60)
            law = f"({fit.a:.3g} / c)^{fit.b:.2g} + {fit.g:.3g},  R² {fit.r_squared:.2f}"
            curve = fit(torch.from_numpy(smooth)).numpy()
            axes[0].plot(smooth, curve, color="0.3", lw=1.2, label=law if fit.a else "no power law: flat")
        axes[0].set(ylabel="loss (nats)", title=title)
        axes[0].legend(fontsize=8, frameon=False)
        if key_share is not None:
            axes[1].step(means[0], means[1 + key_share], where="mid", color="C3")
            axes[1].set(ylabel="key tokens", ylim=(0, None))
            axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
        ticks = 4.0 ** np.arange(1 + np.floor(np.log(means[0, -1]) / np.log(4)))
        axes[-1].set_xscale("log", base=4)
        axes[-1].set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes[-1].set_xlabel("tokens of context (position in the document)")
        return _pixels(figure)


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
