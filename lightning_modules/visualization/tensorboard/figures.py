"""Draw figures of the tokens of all documents."""

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from lightning_modules.visualization.images import STYLE
from lightning_modules.visualization.tensorboard.sums import SHORTEST_FITTED, PositionSums

LSD_EDGES = np.linspace(-6.0, 10.0, 81)
LCL_EDGES = np.linspace(-12.0, 0.0, 61)
"""Bins of 0.2 nats; tokens beyond the edges count in the outer bins."""


@matplotlib.rc_context(STYLE)
def benefit_figure(long: Tensor, short: Tensor, *, alpha: float, beta: float, title: str) -> Figure:
    """Draw the density of tokens by LSD and LCL, with the thresholds.

    Tokens with equal ``[N]`` long and short log-likelihoods, in nats, are left out.
    """
    counts = benefit_counts(long, short)
    figure = Figure(figsize=(6.4, 4.4), dpi=110)
    axis = figure.subplots()
    norm = LogNorm(vmin=1, vmax=max(counts.max(), 2))
    image = axis.pcolormesh(LSD_EDGES, LCL_EDGES, np.ma.masked_equal(counts, 0), norm=norm, cmap="viridis_r")
    figure.colorbar(image, ax=axis, label="tokens")
    axis.axvline(alpha, color="C3", lw=1, ls="--")
    axis.axhline(beta, color="C3", lw=1, ls="--")
    axis.text(LSD_EDGES[-1], 0.3, f"key tokens: LSD > {alpha:g}, LCL > {beta:g} ", ha="right", va="bottom", color="C3")
    axis.set(xlabel="LSD: long minus short log-likelihood (nats)", ylabel="LCL: long log-likelihood (nats)")
    axis.set_ylim(LCL_EDGES[0], 0.25)
    axis.set_title(title, loc="left")
    return figure


def benefit_counts(long: Tensor, short: Tensor) -> NDArray[np.float64]:
    """Count the tokens whose ``[N]`` log-likelihoods differ, as ``[60, 80]`` bins of LCL and LSD."""
    compared = long != short
    lcl = long[compared].clamp(LCL_EDGES[0], LCL_EDGES[-1])
    lsd = (long - short)[compared].clamp(LSD_EDGES[0], LSD_EDGES[-1])
    return np.histogram2d(lcl.numpy(), lsd.numpy(), bins=(LCL_EDGES, LSD_EDGES))[0]


@matplotlib.rc_context(STYLE)
def position_figure(positions: PositionSums, *, title: str) -> Figure:
    """Draw the loss by the length of the context, with its power law.

    The values of the positions are the loss in nats and, if they have three, the loss in the short context and the
    fraction of key tokens.
    """
    (context, loss, *others) = positions.means().numpy()
    fit = positions.fit()
    panels = 1
    bottom = 0.14
    if others:
        panels = 2
        bottom = 0.1
    figure = Figure(figsize=(6.4, 3.4 + 1.4 * (panels - 1)), dpi=110)
    # Matplotlib's automatic layout would take longer than the drawing.
    figure.subplots_adjust(left=0.11, right=0.98, bottom=bottom, top=0.92, hspace=0.08)
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=(3, 1)[:panels])[:, 0]
    axes[0].plot(context, loss, "o-", color="C0", lw=1, markersize=4, label="long context")
    if others:
        axes[0].plot(context, others[0], "s--", color="C1", lw=1, markersize=3, label="short context")
        axes[1].step(context, others[1], where="mid", color="C3")
        axes[1].set(ylabel="key tokens", ylim=(0, None))
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    if fit is not None:
        smooth = np.geomspace(SHORTEST_FITTED, context[-1], 60)
        law = f"({fit.a:.3g} / c)^{fit.b:.2g} + {fit.g:.3g},  R² {fit.r_squared:.2f}"
        axes[0].plot(smooth, fit(torch.from_numpy(smooth)).numpy(), color="0.3", lw=1.2, label=law)
    axes[0].set(ylabel="loss (nats)", title=title)
    axes[0].legend(fontsize=8, frameon=False)
    ticks = 4.0 ** np.arange(1 + np.floor(np.log(context[-1]) / np.log(4)))
    axes[-1].set_xscale("log", base=4)
    axes[-1].set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes[-1].set_xlabel("tokens of context (position in the document)")
    return figure
