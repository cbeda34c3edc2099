"""Takes down what happens on one rank in a traced step. Times are nanoseconds of the clock named in the Recording."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from ..exchange import Peers
from ..kernels import raw_stream
from ..overlap_group import NS, Group

# As csrc/trace.cuh.
STAGE_BEGAN, STAGE_ENDED, TILE_STARTED, TILE_MADE, SENT, PLACED, ARRIVED, SUMMED, CLOCK = range(1, 10)
EVENT = np.dtype(
    [(name, "<i4") for name in ("kind", "stage", "place", "piece", "peer", "sm")] + [("start", "<u8"), ("end", "<u8")]
)
# 40 MiB: a step of some ten layers with 128 experts, 8 of them for each of 8192 tokens.
CAPACITY = 2**20
CLOCK_ROUNDS = 64


@dataclass(frozen=True)
class Recording:
    """What one rank took down.

    Attributes:
        rank: its global rank; ``peers``: those of its group, by place.
        clock: ``"device"``, each GPU's own, or ``"host"``, which ranks of one machine share.
        backend: of the first layer.
        stages: (stage, layer) in the order in which they began, the first of which stands for no stage.
        events: [n] of :data:`EVENT`.
        lost: events for which there was no room.
    """

    rank: int
    peers: tuple[int, ...]
    clock: str
    backend: str
    stages: list[tuple[str, str]]
    events: np.ndarray
    lost: int = 0


class HostRecorder:
    """Stages alone, by the host's clock: on a CPU they end when the host goes on."""

    def __init__(self, peers: Peers):
        self._peers, self._stages, self._open, self._events = peers, [("", "")], [], []

    def enter(self, stage: str, layer: str) -> None:
        self._stages.append((stage, layer))
        self._open.append(len(self._stages) - 1)
        self._note(STAGE_BEGAN, self._open[-1])

    def leave(self) -> None:
        self._note(STAGE_ENDED, self._open.pop())

    def _note(self, kind: int, stage: int) -> None:
        now = time.perf_counter_ns()
        self._events.append((kind, stage, 0, 0, -1, 0, now, now))

    def close(self, backend: str) -> Recording:
        events, peers = np.array(self._events, dtype=EVENT), self._peers
        return Recording(peers.ranks[peers.rank], peers.ranks, "host", backend, self._stages, events)


class DeviceRecorder:
    """Stages, and what the overlap backend's kernels do in them, by the GPU's clock; all ranks of the group make one.

    Args:
        group: what can overlap.
        capacity: events that there is room for.
    """

    def __init__(self, group: Group, peers: Peers, capacity: int = CAPACITY):
        self._group, self._peers, self._stages, self._open = group, peers, [("", "")], []
        words, pool = group.op.EVENT_BYTES // 4, group.pool
        self._buffer = torch.zeros(1 + capacity, words, dtype=torch.int32, device=pool.device)
        self._buffer[0, 0] = capacity
        self._compare_clocks()
        # A kernel that is loaded while others wait for peers would wait for them: the device is idle here.
        self._mark(group.op.STAGE_ENDED, 0)

    def enter(self, stage: str, layer: str) -> None:
        self._stages.append((stage, layer))
        self._open.append(len(self._stages) - 1)
        self._group.pool.trace = self._buffer.data_ptr()
        self._mark(self._group.op.STAGE_BEGAN, self._open[-1])

    def leave(self) -> None:
        self._mark(self._group.op.STAGE_ENDED, self._open.pop())
        # Other layers, which share the pool, are not recorded.
        if not self._open:
            self._group.pool.trace = 0

    def _mark(self, kind: int, stage: int) -> None:
        outer = self._open[-1] if self._open else 0
        stream = raw_stream(self._buffer)
        self._group.op.mark(trace=self._buffer.data_ptr(), kind=kind, stage=stage, outer=outer, stream=stream)

    def close(self, backend: str) -> Recording:
        """Ends the recording, for this rank alone; waits for the device."""
        found = self._buffer.cpu().numpy()
        capacity, count = found[0, :2].tolist()
        events = np.ascontiguousarray(found[1 : 1 + min(count, capacity)]).view(EVENT)[:, 0]
        lost, peers = max(count - capacity, 0), self._peers
        return Recording(peers.ranks[peers.rank], peers.ranks, "device", backend, self._stages, events, lost)

    def _compare_clocks(self) -> None:
        op, pool, peers = self._group.op, self._group.pool, self._peers
        answers, bases = pool.allocate(peers.size, torch.int32)
        answers.zero_()
        addresses = pool.addresses([base + 4 * peers.rank for base in bases])
        pool.meet()
        op.compare_clocks(
            trace=self._buffer.data_ptr(),
            answers=answers.data_ptr(),
            peer_answers=addresses.data_ptr(),
            num_peers=peers.size,
            rank=peers.rank,
            rounds=CLOCK_ROUNDS,
            failure=pool.failure.data_ptr(),
            limit_ns=int(peers.timeout_s * NS),
            stream=raw_stream(answers),
        )
        pool.meet()
