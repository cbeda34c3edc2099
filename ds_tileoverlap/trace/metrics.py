"""What a step's timelines say in numbers. These are the definitions, for the command, the files and the monitors alike.

    compute         times at which a tile of the expert GEMM is made, or a stage runs that is a GEMM alone
    exchange        times at which a part of rows is sent from or to the rank, or put in its place there
    exposed         exchange without compute
    overlap ratio   the share of the exchange that lies under compute, 1 - exposed / exchange
    efficiency      of a stage in which both run: the larger of its exchange and of what its tiles would take with all
                    SMs busy, as a share of the time of both; 1 where the larger one hides everything else

Where exchanges are stages of their own all of these count as exchange, with the gathers and sums in them. The counts
that the layout exchanges count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .timeline import COMPUTE, EXCHANGE, Stage, Timeline

US = 1e3


@dataclass(frozen=True)
class StageMetrics:
    """All stages of one name on one rank; times in microseconds. Ratios are ``None`` where there is no such thing."""

    rank: int
    stage: str
    calls: int
    time_us: float
    compute_us: float
    exchange_us: float
    exposed_us: float
    overlap_ratio: float | None
    efficiency: float | None


def union(spans: np.ndarray) -> np.ndarray:
    """Spans [n, 2] without what they have twice: ``[[0, 3], [2, 5], [7, 8]]`` is ``[[0, 5], [7, 8]]``."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return spans
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > ends[:-1]]))
    return np.stack([spans[begins, 0], ends[np.concatenate([begins[1:] - 1, [len(spans) - 1]])]], 1)


def length(spans: np.ndarray) -> int:
    """How long any of the spans [n, 2] lasts."""
    found = union(spans)
    return int((found[:, 1] - found[:, 0]).sum())


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """How long spans of both kinds last at once: 2 for ``[[0, 5]]`` and ``[[3, 9]]``."""
    return length(a) + length(b) - length(np.concatenate([a, b]))


def spans_of(events: dict[str, np.ndarray], chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
    """[n, 2] int64: when the chosen events began and ended, ns."""
    return np.stack([events["start"][chosen], events["end"][chosen]], 1)


def spans_of_stages(stages: Iterable[Stage]) -> np.ndarray:
    """[n, 2] int64: when the stages began and ended, ns."""
    return np.array([(stage.start, stage.end) for stage in stages], dtype=np.int64).reshape(-1, 2)


def compute_of(timeline: Timeline) -> np.ndarray:
    """When the rank computes, [n, 2]."""
    alone = [stage for stage in timeline.stages if stage.name in COMPUTE]
    return union(np.concatenate([spans_of(timeline.tiles), spans_of_stages(alone)]))


def exchange_of(place: int, timelines: list[Timeline], indices: list[int]) -> np.ndarray:
    """When rows of stages with these indices travel from, to or within the rank at a place of the group, [n, 2]."""
    mine = timelines[place]
    found = [spans_of(events, np.isin(events["stage"], indices)) for events in (mine.sent, mine.placed)]
    for other in timelines:
        if other is not mine:
            sent = other.sent
            found.append(spans_of(sent, np.isin(sent["stage"], indices) & (sent["peer"] == place)))
    overlaps = {stage.layer for stage in mine.stages if stage.is_fused}
    alone = [s for s in mine.stages if s.index in indices and s.name in EXCHANGE and s.layer not in overlaps]
    return union(np.concatenate([*found, spans_of_stages(alone)]))


def metrics(timelines: list[Timeline]) -> list[StageMetrics]:
    """Of every rank and stage, in the order in which stages first began."""
    return [found for place in range(len(timelines)) for found in _of_rank(place, timelines)]


def _of_rank(place: int, timelines: list[Timeline]) -> list[StageMetrics]:
    timeline, found = timelines[place], []
    compute, tiles = compute_of(timeline), timeline.tiles
    num_sms = max(len(np.unique(tiles["sm"])), 1)
    for name in dict.fromkeys(stage.name for stage in timeline.stages):
        stages = [stage for stage in timeline.stages if stage.name == name]
        indices, time = [stage.index for stage in stages], sum(stage.end - stage.start for stage in stages)
        own = spans_of(tiles, np.isin(tiles["stage"], indices))
        busy = int((own[:, 1] - own[:, 0]).sum()) / num_sms if name not in COMPUTE else time
        exchange = exchange_of(place, timelines, indices)
        travels, hidden = length(exchange), shared(exchange, compute)
        both = length(np.concatenate([spans_of_stages(stages), exchange]))
        found.append(
            StageMetrics(
                rank=timeline.rank,
                stage=name,
                calls=len(stages),
                time_us=time / US,
                compute_us=busy / US,
                exchange_us=travels / US,
                exposed_us=(travels - hidden) / US,
                overlap_ratio=hidden / travels if travels else None,
                efficiency=max(busy, travels) / both if stages[0].is_fused and both else None,
            )
        )
    return found


def overlap_ratio(found: list[StageMetrics]) -> float | None:
    """Of all ranks and stages together; ``None`` where nothing travelled."""
    exchange = sum(each.exchange_us for each in found)
    return 1 - sum(each.exposed_us for each in found) / exchange if exchange else None


def exposed_us(found: list[StageMetrics]) -> float:
    """Of the rank where it is most."""
    ranks = {each.rank for each in found}
    return max((sum(each.exposed_us for each in found if each.rank == rank) for rank in ranks), default=0.0)
