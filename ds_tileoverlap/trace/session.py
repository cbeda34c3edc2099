"""One traced step of a job: what listens to its layers, and what is made of it at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist

from ..exchange import Peers
from ..log import say
from . import report
from .recorder import DeviceRecorder, HostRecorder, Recording

if TYPE_CHECKING:
    from ..layer import LayerRuntime

# Of a deep model so many layers show what the others do, too, in a file that a browser opens.
MAX_LAYERS = 8
NO_CLOCK = "on a GPU the sequential backend has no device timestamps"


class Trace:
    """Begins to record the layers' stages, on all ranks together.

    Args:
        layers: of the model, after a forward; the first :data:`MAX_LAYERS` of each group are recorded.
        folder: where the timeline of each expert-parallel group goes.
    """

    def __init__(self, layers: list[LayerRuntime], folder: Path):
        self._folder = folder
        groups: dict[tuple[int, ...], list[LayerRuntime]] = {}
        for runtime in layers:
            if runtime.routing is not None:
                groups.setdefault(runtime.routing.peers.ranks, []).append(runtime)
        self._groups = [_Group(runtimes[:MAX_LAYERS]) for runtimes in groups.values()]

    def end(self) -> dict | None:
        """Writes the timelines; the facts of this rank's first group where the rank is the first of that group, as
        :func:`.report.write` returns them."""
        recordings = [group.end() for group in self._groups]
        written = [self._write(each) for each in recordings if each is not None]
        return written[0] if written else None

    def _write(self, recordings: list[Recording]) -> dict | None:
        first = recordings[0].peers[0]
        name = "trace" if first == 0 else f"trace-{first}"
        try:
            facts = report.write(recordings, self._folder, name)
        except (OSError, ValueError) as error:  # the job is worth more than its timeline
            say(f"trace: not written: {error}", every_rank=True)
            return None
        say(f"trace: {report.in_words(facts)}; {self._folder / name}.json.gz", every_rank=True)
        return facts


class _Group:
    """The layers of one expert-parallel group, on this rank."""

    def __init__(self, runtimes: list[LayerRuntime]):
        self._runtimes, self._peers = runtimes, runtimes[0].routing.peers
        device = torch.device(get_accelerator().current_device_name())
        self._recorder = _recorder(runtimes[0], self._peers, device)
        if self._recorder is None:
            say(f"trace: not written: {NO_CLOCK}")
        for runtime in runtimes:
            runtime.recorder = self._recorder

    def end(self) -> list[Recording] | None:
        """The recordings of all ranks, on the first of them."""
        for runtime in self._runtimes:
            runtime.recorder = None
        if self._recorder is None:
            return None
        recording, peers = self._recorder.close(self._runtimes[0].backend), self._peers
        if peers.size == 1:
            return [recording] if dist.get_rank() == 0 else None
        found = [None] * peers.size if peers.rank == 0 else None
        dist.gather_object(recording, found, dst=peers.ranks[0], group=peers.group)
        return found


def _recorder(runtime: LayerRuntime, peers: Peers, device: torch.device) -> DeviceRecorder | HostRecorder | None:
    group = runtime.overlap_group(peers, device)
    if group is not None:
        return DeviceRecorder(group, peers)
    return HostRecorder(peers) if device.type == "cpu" else None
