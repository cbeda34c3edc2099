"""Names of the stages for profilers and traces, and DeepSpeed's timers under ``wall_clock_breakdown``.

    forward    moe { route, layout, dispatch, expert_gemm, combine }
    backward   combine backward, expert_gemm backward, dispatch backward, [dispatch again,] expert_gemm weight gradients

Where an exchange and a GEMM are one kernel the names are joined: ``dispatch => expert_gemm``.
"""

from __future__ import annotations

from typing import Protocol

from deepspeed.accelerator import get_accelerator
from deepspeed.moe.sharded_moe import (
    FIRST_ALLTOALL_TIMER,
    MOE_TIMER,
    SECOND_ALLTOALL_TIMER,
    TOPK_GATE_TIMER,
    MOELayer,
)

# stage -> (timer, whether the gate owns it, attribute that DeepSpeed's engine reads)
_TIMED = {
    "moe": (MOE_TIMER, False, "time_moe"),
    # Not where the gate itself is called, which starts the same timer.
    "route": (TOPK_GATE_TIMER, True, "gate_time"),
    "dispatch": (FIRST_ALLTOALL_TIMER, False, "time_falltoall"),
    "combine": (SECOND_ALLTOALL_TIMER, False, "time_salltoall"),
}


class Recorder(Protocol):
    """Who is told of every stage of a traced step; see :mod:`ds_tileoverlap.trace`."""

    def enter(self, stage: str, layer: str) -> None: ...

    def leave(self) -> None: ...


class Stages:
    """``with stages("dispatch"): ...`` marks a stage of one layer's forward or backward."""

    def __init__(self, layer: MOELayer):
        self._layer = layer

    def __call__(self, name: str, times_itself: bool = False) -> _Range:
        is_timed = name in _TIMED and self._layer.wall_clock_breakdown and not times_itself
        return (_TimedRange if is_timed else _Range)(name, self._layer)


class _Range:
    def __init__(self, name: str, layer: MOELayer):
        self._name, self._runtime = name, layer.tile_overlap
        self._recorder: Recorder | None = self._runtime.recorder

    def __enter__(self) -> None:
        get_accelerator().range_push(self._name)
        if self._recorder is not None:
            self._recorder.enter(self._name, self._runtime.name)

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.leave()
        get_accelerator().range_pop()


class _TimedRange(_Range):
    def __init__(self, name: str, layer: MOELayer):
        super().__init__(name, layer)
        self._timer, of_gate, self._attribute = _TIMED[name]
        self._owner = layer.gate if of_gate else layer

    def __enter__(self) -> None:
        super().__enter__()
        self._owner.timers(self._timer).start()

    def __exit__(self, *_: object) -> None:
        timer = self._owner.timers(self._timer)
        timer.stop()
        setattr(self._owner, self._attribute, timer.elapsed(reset=False))
        super().__exit__()
