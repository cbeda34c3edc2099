"""The simulated rank as rows of characters, and as a PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .forecast import Forecast
from .stages import Timeline

SHADES = " ░▒▓█"
WIDTH = 64
# Name of a span -> its row where rows arrive, and where they return.
ROWS = {
    "math": ("math", "math"),
    "out": ("couriers out", "couriers out"),
    "arrivals": ("arrivals", "arrivals"),
    "small": ("own rows", "begin, sum"),
}


def busy(starts: np.ndarray, ends: np.ndarray, workers: int, end: float, num_bins: int) -> np.ndarray:
    """The share of the workers that is busy in each bin [num_bins] of the time from 0 to ``end``.

    One of two workers busy from 1 to 3 is ``[0.25, 0.25]`` of two bins up to 4.
    """
    edges = np.linspace(0.0, end, num_bins + 1)
    worked = np.array([np.clip(edge - starts, 0.0, ends - starts).sum() for edge in edges])
    return np.diff(worked) / (end / num_bins * workers)


def shares(timeline: Timeline, name: str, end: float, num_bins: int) -> np.ndarray:
    """[num_bins]: the share of a row of the timeline that is busy in each bin up to ``end``."""
    workers = timeline.workers if name == "math" else 1
    return busy(*timeline.spans[name], workers, end, num_bins)


def text(timeline: Timeline, arrives: bool) -> list[str]:
    """A line for each row, darker where more of it is busy."""
    lines = []
    for name, labels in ROWS.items():
        found = shares(timeline, name, timeline.end, WIDTH).clip(0, 1)
        # Whatever happens in a bin shows.
        shade = np.ceil(found.round(6) * (len(SHADES) - 1)).astype(int)
        lines.append(f"{labels[not arrives]:>12s} │{''.join(SHADES[i] for i in shade)}│")
    return lines


def draw(forecast: Forecast, path: Path) -> None:
    """Draws the four stages, one below the other, on one scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(forecast.works), figsize=(9, 8), sharex=True, layout="constrained")
    longest = max(timeline.end for timeline in forecast.timelines)
    for axis, work, timeline, stage in zip(axes, forecast.works, forecast.timelines, forecast.stages):
        _draw_stage(axis, timeline, longest, work.stage.arrives)
        axis.axvline(stage.gemm_us, color="black", linewidth=0.8, linestyle=":", label="GEMM alone")
        axis.set_title(f"{stage.title}: {stage.overlap_us:.0f} us, sequential {stage.sequential_us:.0f} us", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower right")
    axes[-1].set_xlabel("us from the start of the stage on the device (simulated)")
    shape, profile = forecast.shape, forecast.profile
    measured = "" if profile.link_is_measured else ", link not measured"
    figure.suptitle(
        f"H={shape.hidden} I={shape.intermediate} E={shape.experts} k={shape.top_k} tokens={shape.tokens}, "
        f"{forecast.num_ranks} ranks, rates of {profile.name}{measured}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_stage(axis, timeline: Timeline, longest: float, arrives: bool, num_bins: int = 600) -> None:
    at = np.linspace(0.0, longest, num_bins + 1)
    for row, name in enumerate(ROWS):
        found = shares(timeline, name, longest, num_bins).clip(0, 1)
        axis.stairs(-row + 0.8 * found, at, baseline=-row, fill=True, color=f"C{row}")
    names = [labels[not arrives] for labels in ROWS.values()]
    axis.set_yticks([0.4 - row for row in range(len(ROWS))], names, fontsize=8)
    axis.set_xlim(0, longest * 1.02)
    axis.spines[["top", "right"]].set_visible(False)
