"""Names of the stages for profilers, and DeepSpeed's timers under ``wall_clock_breakdown``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        accelerator, timed = get_accelerator(), name in _TIMED and self._layer.wall_clock_breakdown
        accelerator.range_push(name)
        if timed:
            timer, of_gate, attribute = _TIMED[name]
            owner = self._layer.gate if of_gate else self._layer
            owner.timers(timer).start()
        try:
            yield
        finally:
            if timed:
                owner.timers(timer).stop()
                setattr(owner, attribute, owner.timers(timer).elapsed(reset=False))
            accelerator.range_pop()
