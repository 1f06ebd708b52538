"""Labels of logarithmic axes, however many decades they span."""

from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.real_models.figures import label_decades
from lightning_modules.visualization.images import STYLE


@pytest.mark.parametrize("decades", [0.7, 1.1, 1.3, 1.9, 2.1, 3.0])
@matplotlib.rc_context(STYLE)
def test_labels_do_not_overlap(decades):
    figure = Figure(figsize=(6.8, 2.7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    plot = figure.subplots(1, 3)[0]
    plot.plot(30 * np.array([1.0, 10**decades]), [0, 1], "o")
    plot.set(xscale="log")
    label_decades(plot)
    canvas.draw()
    low, high = plot.get_xlim()
    shown = [label for label in plot.get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = [label.get_window_extent() for label in shown]
    assert len(boxes) > 1
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
