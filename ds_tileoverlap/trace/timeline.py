"""Recordings of a group on one clock, sorted into stages, tiles and parts of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .recorder import ARRIVED, CLOCK, PLACED, SENT, STAGE_BEGAN, STAGE_ENDED, SUMMED, TILE_MADE, TILE_STARTED, Recording

# Stages of a GEMM alone.
COMPUTE = ("expert_gemm", "expert_gemm backward", "expert_gemm weight gradients")
# Stages of an exchange alone, where exchanges do not overlap.
EXCHANGE = ("dispatch", "combine", "combine backward", "dispatch backward", "dispatch again")
JOINED = "=>"


@dataclass(frozen=True)
class Stage:
    """A stage of one layer on one rank, from ``start`` to ``end``; ``index``: of the rank's stages."""

    index: int
    name: str
    layer: str
    start: int
    end: int

    @property
    def is_fused(self) -> bool:
        return JOINED in self.name


class Timeline:
    """One rank's step. Times are nanoseconds from the group's first event on the clock of its first rank.

    Args:
        offset: what the rank's clock is ahead of the first rank's, and the time of the first event there.
    """

    def __init__(self, recording: Recording, offset: int):
        self.recording, self.rank, self._offset = recording, recording.rank, offset
        events = recording.events[recording.events["kind"] != CLOCK]
        self._events = events[np.argsort(events["end"], kind="stable")]
        self._names = [name for name, _ in recording.stages]

    def of(self, kind: int) -> dict[str, np.ndarray]:
        """The events of a kind: its fields [n] int64."""
        events = self._events[self._events["kind"] == kind]
        fields = {name: events[name].astype(np.int64) for name in events.dtype.names}
        for name in ("start", "end"):
            fields[name] = fields[name] - self._offset
        return fields

    @cached_property
    def stages(self) -> list[Stage]:
        """In the order in which they began; those alone that also ended."""
        began, ended = self.of(STAGE_BEGAN), self.of(STAGE_ENDED)
        ends = dict(zip(ended["stage"].tolist(), ended["start"].tolist()))
        return [
            Stage(index, *self.recording.stages[index], start, ends[index])
            for index, start in zip(began["stage"].tolist(), began["start"].tolist())
            if index in ends
        ]

    @cached_property
    def tiles(self) -> dict[str, np.ndarray]:
        """``stage``, ``place`` (band), ``piece`` (column tile), ``sm``, ``consumed`` (its rows are there, its first
        operands are loaded), ``start`` (the tile before it on its SM is made, too) and ``end`` of each tile [n]."""
        started, made = (_numbered(self.of(kind)) for kind in (TILE_STARTED, TILE_MADE))
        # The second of two CTAs may have no columns; a lost event has no partner.
        _, at, to = np.intersect1d(started["key"], made["key"], return_indices=True)
        tiles = {name: made[name][to] for name in ("stage", "place", "piece", "sm")}
        tiles["consumed"], tiles["end"] = started["end"][at], made["start"][to]
        order = np.lexsort((tiles["end"], tiles["sm"]))
        tiles = {name: values[order] for name, values in tiles.items()}
        before = np.where(np.diff(tiles["sm"], prepend=-1) == 0, np.roll(tiles["end"], 1), 0)
        tiles["start"] = np.minimum(np.maximum(tiles["consumed"], before), tiles["end"])
        return tiles

    @cached_property
    def sent(self) -> dict[str, np.ndarray]:
        """What left, part by part."""
        sent, belongs = self.of(SENT), list(range(len(self._names)))
        # Couriers on SMs of their own may still be at it in the next stage.
        for stage, name in enumerate(self._names):
            if name in COMPUTE:
                belongs[stage] = belongs[stage - 1]
        return {**sent, "stage": np.array(belongs)[sent["stage"]]}

    @cached_property
    def placed(self) -> dict[str, np.ndarray]:
        return self.of(PLACED)

    @cached_property
    def arrived(self) -> dict[str, np.ndarray]:
        """Waits for rows that return."""
        return self.of(ARRIVED)

    @cached_property
    def summed(self) -> dict[str, np.ndarray]:
        return self.of(SUMMED)


def _numbered(events: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With a ``key`` for each: stage, place, piece, and a number where there are several alike, in order of time."""
    key = (events["stage"] << 20 | events["place"]) << 24 | events["piece"] << 8
    order = np.lexsort((events["end"], key))
    events, key = {name: values[order] for name, values in events.items()}, key[order]
    is_first = np.diff(key, prepend=-1) != 0
    number = np.arange(len(key)) - np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    return {**events, "key": key + number}


def aligned(recordings: list[Recording]) -> list[Timeline]:
    """The ranks' timelines on the first rank's clock.

    Args:
        recordings: of all ranks of a group, by place.
    """
    offsets = clock_offsets(recordings)
    firsts = [
        int(r.events["start"][r.events["kind"] == STAGE_BEGAN].min(initial=np.iinfo(np.uint64).max)) for r in recordings
    ]
    zero = min(first - offset for first, offset in zip(firsts, offsets))
    return [Timeline(recording, offset + zero) for recording, offset in zip(recordings, offsets)]


def clock_offsets(recordings: list[Recording]) -> list[int]:
    """What each rank's clock is ahead of the first rank's, in nanoseconds.

    The first rank asks every other several times. The answer that came soonest was given about halfway between.
    Asked at 100 and answered at 140, when the peer's clock showed 1020, the peer is 900 ahead.
    """
    if recordings[0].clock == "host":
        return [0] * len(recordings)
    offsets = [0]
    for place, recording in enumerate(recordings[1:], start=1):
        asked, given = _clock_events(recordings[0], place), _clock_events(recording, 0)
        took = {number: int(event["end"] - event["start"]) for number, event in asked.items() if number in given}
        if not took:
            raise ValueError(f"trace: the clock of rank {recording.rank} was not compared: no room for its events")
        best = min(took, key=took.get)
        offsets.append(int(given[best]["end"]) - (int(asked[best]["start"]) + int(asked[best]["end"])) // 2)
    return offsets


def _clock_events(recording: Recording, peer: int) -> dict[int, np.void]:
    events = recording.events
    events = events[(events["kind"] == CLOCK) & (events["peer"] == peer)]
    return dict(zip(events["place"].tolist(), events))
