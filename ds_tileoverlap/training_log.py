"""What is said of a training job: a line every so many steps, one traced step; DeepSpeed's monitors get the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import distributed as dist

from .config import TileOverlapConfig
from .layer import runtimes_of
from .log import say
from .trace.session import Trace


class Watch:
    """Looks at an engine after each optimizer step: logs, and traces one step. Nothing in it waits for the device, but
    the end of the traced step.

    Args:
        engine: of DeepSpeed; every rank makes a Watch.
    """

    def __init__(self, engine: Any, config: TileOverlapConfig):
        self._engine, self._config, self._steps = engine, config, 0
        self._layers = runtimes_of(engine.module)
        self._trace: Trace | None = None
        self._overlap_ratio: float | None = None
        # The one place that a step passes, whatever kind of engine it is.
        take_step = engine._take_model_step

        @functools.wraps(take_step)
        def take_step_and_look(*args: Any, **kwargs: Any) -> None:
            take_step(*args, **kwargs)
            self._look()

        engine._take_model_step = take_step_and_look

    def _look(self) -> None:
        self._steps += 1
        trace, every = self._config.trace, self._config.log_every
        if self._trace is not None:
            facts, self._trace = self._trace.end(), None
            self._note_trace(facts)
        if trace is not None and self._steps == trace.step:
            self._trace = Trace(self._layers, Path(trace.folder))
        if every and self._engine.global_steps % every == 0:
            self._log()

    def _log(self) -> None:
        routed = [runtime for runtime in self._layers if runtime.routing is not None]
        if not routed or dist.get_rank() != 0:
            return
        load, name = max(((each.routing.load, each.name) for each in routed), key=lambda found: found[0])
        dropped = sum(each.routing.dropped for each in routed) / len(routed)
        line = f"fullest expert {load:.2f} times the mean ('{name}'), {dropped:.2%} dropped"
        if self._overlap_ratio is not None:
            line += f", overlap ratio {self._overlap_ratio:.2f} when traced"
        say(f"step {self._engine.global_steps}: {line}")
        self._monitor({"expert_load": load, "drop_rate": dropped})

    def _note_trace(self, facts: dict | None) -> None:
        """Args: facts, on the first rank of a group, of :func:`ds_tileoverlap.trace.report.write`."""
        if facts is None or dist.get_rank() != 0:
            return
        self._overlap_ratio = facts["overlap_ratio"]
        values = {name: facts[name] for name in ("overlap_ratio", "exposed_us")}
        for each in facts["stages"]:
            if each["rank"] == 0:
                stage = each["stage"].replace("=>", "to")  # monitors make names of files of it
                values |= {f"{stage}/{name}": each[name] for name in ("time_us", "exposed_us", "efficiency")}
        self._monitor({name: value for name, value in values.items() if value is not None})

    def _monitor(self, values: dict[str, float]) -> None:
        if self._engine.monitor.enabled:
            samples = self._engine.global_samples
            self._engine.monitor.write_events([(f"Train/MoE/{name}", value, samples) for name, value in values.items()])
