"""Timelines as a file that ui.perfetto.dev and chrome://tracing open: the Trace Event Format, times in microseconds.

A process is a rank. Its threads are the stages, nested, and every SM with its tiles. Segments of rows that left, or
were put in place, overlap one another: they are asynchronous events beside the threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..appearing import appearing
from .timeline import Timeline

US = 1e3
STAGES, SUMS, FIRST_SM = 0, 1, 10
# Lines of sums that are drawn as one segment.
LINES = 256


def write(path: Path, timelines: list[Timeline], facts: dict) -> None:
    """Writes the file, compressed; it is there whole or not at all.

    Args:
        facts: what stands beside the events, under ``otherData``.
    """
    events = [event for timeline in timelines for event in events_of(timeline)]
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}
    with appearing(path) as part, gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump(document, file)


def read(path: Path) -> dict:
    """The document that :func:`write` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def events_of(timeline: Timeline) -> Iterator[dict]:
    """One rank's events."""
    rank, names = timeline.rank, [f"{stage} ({layer})" for stage, layer in timeline.recording.stages]
    yield _named(rank, "process_name", f"rank {rank}", 0)
    yield _named(rank, "thread_name", "stages", STAGES)
    for stage in timeline.stages:
        yield _slice(rank, STAGES, stage.name, "stage", stage.start, stage.end, layer=stage.layer)
    tiles = {name: values.tolist() for name, values in timeline.tiles.items()}
    for sm in sorted(set(tiles["sm"])):
        yield _named(rank, "thread_name", f"SM {sm}", FIRST_SM + sm)
    for stage, band, tile, sm, consumed, start, end in zip(
        *(tiles[name] for name in ("stage", "place", "piece", "sm", "consumed", "start", "end"))
    ):
        where = dict(stage=names[stage], band=band, column_tile=tile, consumed_us=consumed / US)
        yield _slice(rank, FIRST_SM + sm, f"tile {band}, {tile}", "tile", start, end, **where)
    for name, category, events, places in (
        ("sent to", "sent", timeline.sent, _segments(timeline.sent)),
        ("landed from", "landed", timeline.placed, timeline.placed["place"]),
    ):
        yield from _merged(rank, name, category, events, places, names)
    if len(timeline.arrived["start"]):
        yield _named(rank, "thread_name", "sums of rows that return", SUMS)
    for stage, start, end in zip(*(timeline.arrived[name].tolist() for name in ("stage", "start", "end"))):
        yield _slice(rank, SUMS, "wait for rows", "wait", start, end, stage=names[stage])
    for stage, start, end, _ in _groups(timeline.summed, timeline.summed["stage"]):
        yield _slice(rank, SUMS, "sum", "sum", start, end, stage=names[stage])


def _segments(sent: dict[str, np.ndarray]) -> np.ndarray:
    """A number for each run of rows that is drawn as one: a segment, or neighbouring lines of sums in a panel."""
    is_sum = sent["piece"] >= 0
    return np.where(is_sum, (sent["place"] // LINES) << 8 | np.maximum(sent["piece"], 0), sent["place"])


def _groups(events: dict[str, np.ndarray], *keys: np.ndarray) -> Iterator[tuple[int, ...]]:
    """(keys .., first start, last end, how many) of events that are alike in all keys."""
    if not len(events["start"]):
        return
    found, at, counts = np.unique(np.stack(keys, 1), axis=0, return_inverse=True, return_counts=True)
    starts, ends = np.full(len(found), np.iinfo(np.int64).max), np.zeros(len(found), dtype=np.int64)
    np.minimum.at(starts, at.ravel(), events["start"])
    np.maximum.at(ends, at.ravel(), events["end"])
    yield from zip(*found.T.tolist(), starts.tolist(), ends.tolist(), counts.tolist())


def _merged(
    rank: int, name: str, category: str, events: dict[str, np.ndarray], places: np.ndarray, names: list[str]
) -> Iterator[dict]:
    keys = (events["stage"], events["peer"], places)
    for i, (stage, peer, place, start, end, parts) in enumerate(_groups(events, *keys)):
        common = dict(name=f"{name} {peer}", cat=category, pid=rank, tid=0, id=f"{category}{rank}.{i}")
        yield dict(common, ph="b", ts=start / US, args=dict(stage=names[stage], place=place, parts=parts))
        yield dict(common, ph="e", ts=end / US)


def _named(rank: int, kind: str, name: str, thread: int) -> dict:
    return dict(ph="M", pid=rank, tid=thread, name=kind, args=dict(name=name))


def _slice(rank: int, thread: int, name: str, category: str, start: int, end: int, **arguments: object) -> dict:
    times = dict(ts=start / US, dur=(end - start) / US)
    return dict(ph="X", pid=rank, tid=thread, name=name, cat=category, **times, args=arguments)
