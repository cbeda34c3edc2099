"""Timelines of a group as a PNG: for each rank how many SMs compute, and when rows leave, land and are waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..planning.timeline import busy
from .metrics import spans_of, spans_of_stages, union
from .timeline import COMPUTE, EXCHANGE, Timeline

BINS = 1200
MS = 1e6


def rows_of(timeline: Timeline) -> dict[str, tuple[np.ndarray, int]]:
    """Name of a row -> its spans [n, 2], and how many of them there may be at once."""
    tiles, exchange = timeline.tiles, spans_of_stages(s for s in timeline.stages if s.name in EXCHANGE)
    alone = spans_of_stages(s for s in timeline.stages if s.name in COMPUTE)
    if not len(tiles["end"]):
        return {"GEMM": (alone, 1), "exchange": (exchange, 1)}
    return {
        "SMs with a tile": (spans_of(tiles), len(np.unique(tiles["sm"]))),
        "weight gradients": (alone, 1),
        "rows leave": (union(spans_of(timeline.sent)), 1),
        "rows put in place": (union(spans_of(timeline.placed)), 1),
        "wait, sum": (union(np.concatenate([spans_of(timeline.arrived), spans_of(timeline.summed)])), 1),
    }


def draw(timelines: list[Timeline], path: Path, title: str) -> None:
    """Draws the ranks, one below the other, on one clock."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(timelines), figsize=(12, 1 + 2.2 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    end = max(stage.end for timeline in timelines for stage in timeline.stages)
    for axis, timeline in zip(axes[:, 0], timelines):
        _draw_rank(axis, timeline, end)
    axes[-1, 0].set_xlabel("ms from the first stage of any rank")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_rank(axis, timeline: Timeline, end: int) -> None:
    rows, at = rows_of(timeline), np.linspace(0.0, end / MS, BINS + 1)
    for row, (spans, workers) in enumerate(rows.values()):
        found = busy(spans[:, 0], spans[:, 1], workers, end, BINS).clip(0, 1)
        axis.stairs(-row + 0.8 * found, at, baseline=-row, fill=True, color=f"C{row}")
    axis.set_yticks([0.4 - row for row in range(len(rows))], list(rows), fontsize=8)
    # Names of neighbours stand at two heights.
    for i, stage in enumerate(stage for stage in timeline.stages if stage.name != "moe"):
        axis.axvline(stage.start / MS, color="grey", linewidth=0.4)
        if stage.end - stage.start > end / 25:
            axis.text(
                (stage.start + stage.end) / 2 / MS, 0.9 + i % 2 * 0.25, stage.name, fontsize=6, ha="center", va="bottom"
            )
    axis.set_xlim(0, end / MS)
    axis.set_ylim(0.2 - len(rows), 1.4)
    axis.set_title(f"rank {timeline.rank}", fontsize=9, loc="left", pad=2)
    axis.spines[["top", "right"]].set_visible(False)
