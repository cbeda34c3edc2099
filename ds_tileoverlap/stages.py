"""Names of the stages for profilers, and DeepSpeed's timers under ``wall_clock_breakdown``."""

from __future__ import annotations

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
    "route": (TOPK_GATE_TIMER, True, "gate_time"),
    "dispatch": (FIRST_ALLTOALL_TIMER, False, "time_falltoall"),
    "combine": (SECOND_ALLTOALL_TIMER, False, "time_salltoall"),
}


class Stages:
    """``with stages("dispatch"): ...`` marks a stage of one layer's forward or backward."""

    def __init__(self, layer: MOELayer):
        self._layer = layer

    def __call__(self, name: str) -> _Range:
        return _TimedRange(name, self._layer) if name in _TIMED and self._layer.wall_clock_breakdown else _Range(name)


class _Range:
    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        get_accelerator().range_push(self._name)

    def __exit__(self, *_: object) -> None:
        get_accelerator().range_pop()


class _TimedRange(_Range):
    def __init__(self, name: str, layer: MOELayer):
        super().__init__(name)
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
