"""How times are taken, and where: bursts of arms in turn, maxima over the ranks, and the machine they are of.

A sample is a burst of back-to-back iterations of one arm, each between two events, of which the first is dropped; arms
alternate burst by burst; times are maxima over the ranks, then medians over samples.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import deepspeed
import torch
import triton
from torch import distributed as dist

from ..programs import driver_version, printed_by

BURST = 4
# Relative, of bf16 results that were summed in another order.
TOLERANCE = 2e-2
# Copies over one link, back to back.
COPY_BYTES, COPIES = 2**28, 4


def interleaved(
    names: Sequence[str], step: Callable[[str, int], None], samples: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of single iterations, the maximum over ranks, for each arm."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for sample in range(-2, samples):
        for turn in range(len(names)):
            name = names[(turn + sample) % len(names)]
            synchronize(device)
            clocks = []
            for i in range(BURST):
                with clock(device) as read:
                    step(name, i)
                clocks.append(read)
            synchronize(device)
            burst = torch.tensor([read() for read in clocks], device=device)
            dist.all_reduce(burst, op=dist.ReduceOp.MAX)
            if sample >= 0:
                times[name] += burst[1:].tolist()
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def clock(device: torch.device):
    """Yields a function that, once the device is done, says how many milliseconds the block took."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield lambda: start.elapsed_time(end)
        end.record()
        return
    span = [time.perf_counter()]
    yield lambda: (span[1] - span[0]) * 1e3
    span.append(time.perf_counter())


def summary(times: list[float]) -> dict:
    """Percentiles of times, in their unit."""
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
        "samples": len(ordered),
    }


def on_all_ranks(passed: bool, device: torch.device) -> bool:
    """Whether all ranks say so."""
    verdict = torch.tensor([int(passed)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def copy_speed(source: int, target: int) -> float:
    """GB/s of copies from one GPU to another."""
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty_like(here, device=f"cuda:{target}")
    there.copy_(here)
    torch.cuda.synchronize(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(source):
        start.record()
        for _ in range(COPIES):
            there.copy_(here, non_blocking=True)
        end.record()
        end.synchronize()
    return COPIES * COPY_BYTES / start.elapsed_time(end) / 1e6


def environment(device: torch.device, command: str) -> dict:
    """What a record says of its machine, its software and how it was made."""
    found = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "deepspeed": deepspeed.__version__,
        "command": command,
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver_version() or None
    if find_spec("transformers"):
        found["transformers"] = metadata.version("transformers")
    root = Path(__file__).parents[2]
    # An installed package may lie inside a repository of somebody else.
    if (root / ".git").exists() and (commit := printed_by("git", "-C", str(root), "rev-parse", "--short", "HEAD")):
        found["commit"] = commit.strip()
    return found
