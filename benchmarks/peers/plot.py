"""Plot of a report: cycles a second under each load, and the CPU time of a cycle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.figures import Summary
from benchmarks.peers.measure import SHAPES
from benchmarks.peers.report import Report
from benchmarks.peers.table import duration, percent, rate

OURS, THEIRS = "#1f6f8b", "#b9bfc6"
INK = "#333333"


def plot(report: Report, file: Path) -> None:
    """Draw a report. ImportError if matplotlib is not installed."""
    from matplotlib.axes import Axes  # noqa: PLC0415 - an optional dependency
    from matplotlib.figure import Figure  # noqa: PLC0415

    def bars(axes: Axes, title: str, values: Mapping[str, float], labels: Mapping[str, str]) -> None:
        names = [name.replace("`", "") for name in values]
        colors = [OURS if name.startswith("Genie") else THEIRS for name in names]
        drawn = axes.barh(names, list(values.values()), color=colors)
        axes.bar_label(drawn, [f" {labels[name]}" for name in values], fontsize=8, color=INK)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelsize=8, labelcolor=INK)
        axes.set_xticks([])

    figure = Figure(figsize=(11, 12), layout="constrained")
    panels = list(figure.subplots(3, 2).flat)
    for shape, axes in zip(SHAPES, panels[:-2], strict=True):
        rows = report.summaries(shape.slug)
        label = _handed if shape.hot else rate
        title = f"{shape.title}:\ncycles/s" + (" (share that was handed over)" if shape.hot else "")
        bars(
            axes,
            title,
            {name: summary.rate for name, summary in rows.items()},
            {name: label(summary) for name, summary in rows.items()},
        )
    for shape, axes in zip((SHAPES[0], SHAPES[-1]), panels[-2:], strict=True):
        costs = {name: summary.server_us for name, summary in report.summaries(shape.slug).items()}
        bars(
            axes,
            f"{shape.title}:\nserver CPU a cycle (less is better)",
            costs,
            {name: duration(cost) for name, cost in costs.items()},
        )
    disturbed = f"; other programs used {percent(report.others)} of a processor" if report.others else ""
    figure.supxlabel(f"{report.date}, {report.machine}; medians of the rounds{disturbed}", fontsize=8, color=INK)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _handed(summary: Summary) -> str:
    return f"{rate(summary)} ({percent(summary.handed_over)})"
