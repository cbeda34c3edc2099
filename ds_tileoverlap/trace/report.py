"""Everything that is written of a traced step, and what the command prints."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from . import drawing, perfetto
from .metrics import exposed_us, metrics, overlap_ratio
from .recorder import Recording
from .timeline import aligned

TIMES = ("time_us", "compute_us", "exchange_us", "exposed_us")


def write(recordings: list[Recording], folder: Path, name: str) -> dict:
    """Writes ``name.json.gz`` and, where matplotlib is installed, ``name.png``.

    Args:
        recordings: of all ranks of a group, by place.

    Returns:
        The facts that stand in the file: the backend, the clock, the layers, ``stages`` (the fields of every
        :class:`~.metrics.StageMetrics`), ``overlap_ratio``, ``exposed_us``, ``lost_events``.
    """
    timelines, first = aligned(recordings), recordings[0]
    found = metrics(timelines)
    facts = {
        "backend": first.backend,
        "clock": first.clock,
        "clock_resolution_ns": min(map(_resolution, recordings)),
        "ranks": list(first.peers),
        "layers": list(dict.fromkeys(layer for _, layer in first.stages[1:])),
        "overlap_ratio": overlap_ratio(found),
        "exposed_us": exposed_us(found),
        "lost_events": sum(recording.lost for recording in recordings),
        "stages": [asdict(each) for each in found],
    }
    folder.mkdir(parents=True, exist_ok=True)
    perfetto.write(folder / f"{name}.json.gz", timelines, facts)
    if find_spec("matplotlib") is not None:
        drawing.draw(timelines, folder / f"{name}.png", in_words(facts))
    return facts


def _resolution(recording: Recording) -> int:
    """The smallest step of the rank's clock that was seen."""
    steps = np.diff(np.unique(recording.events["end"]))
    return int(steps.min()) if len(steps) else 0


def in_words(facts: dict) -> str:
    """One line."""
    ratio = facts["overlap_ratio"]
    words = "nothing travelled" if ratio is None else f"overlap ratio {ratio:.2f}, exposed {facts['exposed_us']:.0f} us"
    lost = f"; {facts['lost_events']} events found no room" if facts["lost_events"] else ""
    return f"{facts['backend']} on {len(facts['ranks'])} ranks: {words} (times by the {facts['clock']}'s clock){lost}"


def show(facts: dict) -> None:
    """Prints a table; of each stage the rank on which it took longest."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("us on the slowest rank of each stage; exposed: exchange without compute")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage")
    for column in ("calls", "time", "compute", "exchange", "exposed", "overlap", "efficiency"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(each["stage"] for each in facts["stages"]):
        each = max((e for e in facts["stages"] if e["stage"] == name), key=lambda e: e["time_us"])
        ratios = ["" if each[ratio] is None else f"{each[ratio]:.2f}" for ratio in ("overlap_ratio", "efficiency")]
        table.add_row(name, str(each["calls"]), *(f"{each[time]:.0f}" for time in TIMES), *ratios)
    console.print(table)
    console.print(in_words(facts), highlight=False)
