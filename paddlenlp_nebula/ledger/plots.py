"""Plots of what the ledgers of several clusters say. Needs the extra ``notebook``."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from itertools import cycle
from typing import Any

from IPython.display import DisplayHandle, Image
from matplotlib.figure import Figure

__all__ = ["LossPlot", "loss_figure"]

# Distinct for the colour-blind; dashes because equal clusters' curves lie on one another.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", "--", "-.", ":")
_PIXELS_PER_INCH = 100


def loss_figure(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The training loss of every cluster over the optimizer steps.

    Args:
        reports: cluster -> its report, see `Ledger.report`; empty before it trains.
    """
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss")
    axes.set_title(_headline(reports), fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for (name, report), colour, dashes in zip(reports.items(), cycle(_COLOURS), cycle(_DASHES), strict=False):
        if points := [point for point in report.get("losses") or () if point[1] is not None]:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, dashes, color=colour, marker="o", markersize=3, label=f"{name}  {losses[-1]:.3f}")
    if axes.lines:
        axes.legend(frameon=False)
    if horizon := max((report.get("max_steps") or 0 for report in reports.values()), default=0):
        axes.set_xlim(0, horizon)  # fixed, so that the picture does not jump
    return figure


class LossPlot:
    """`loss_figure` below a notebook cell, always the same one."""

    def __init__(self) -> None:
        self._handle = DisplayHandle()
        self._handle.display(_image(loss_figure({})))

    def show(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Draw it anew in its place."""
        self._handle.update(_image(loss_figure(reports)))


def _headline(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """How far they are, in a line."""
    training = [report for report in reports.values() if report]
    if not training:
        return "the clusters start and meet..."
    steps = min(report.get("steps", 0) for report in training)
    parts = [f"step {steps} of {training[0].get('max_steps')}"]
    parts.append(f"{sum(report.get('bytes_sent', 0) for report in training) / 1e6:,.1f} MB sent")
    if busy := [report["utilisation"] for report in training if report.get("utilisation")]:
        parts.append(f"busy training {min(busy):.0%}")
    parts += [f"{name}: {report['status']}" for name, report in reports.items() if report.get("status") != "training"]
    return " · ".join(parts)


def _image(figure: Figure) -> Image:
    # A picture of its own rather than the figure: that would need pyplot's inline backend, which shows it twice.
    content = BytesIO()
    figure.savefig(content, format="png", dpi=_PIXELS_PER_INCH * 2)
    width = round(figure.get_figwidth() * _PIXELS_PER_INCH)
    return Image(data=content.getvalue(), format="png", width=width)
