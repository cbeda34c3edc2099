"""Whether a machine is as fast as its profile says: one GEMM and one exchange, measured when a group is first used.

A profile fits by the name of the GPU and of its link. A GPU that is throttled or shared, or a link with errors, has the
same names; what ``auto`` takes from the profile would be of another machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..config import TileOverlapConfig
from ..exchange import Peers
from ..symmetric_layout import choose_returns
from .profile import Profile
from .routing import Shape, balanced
from .stages import Work, all_to_all_us, gemm_us, stages_of

# A part that takes so many times as long as predicted, or as short, is of another machine. More than clocks and power
# limits of one kind of GPU differ by.
TOLERANCE = 1.5
SAMPLES = 7


def why_not(profile: Profile, peers: Peers, device: torch.device) -> str | None:
    """What the group's ranks are not as fast at as the profile says, the same on all of them; ``None`` if nothing.

    Collective; takes milliseconds and about 200 MB for as long.
    """
    work = _work(peers)
    predicted = {
        "torch's grouped GEMM": gemm_us(work, profile, by_torch=True),
        "an all-to-all": all_to_all_us(work.plan.remote_routes, work, profile),
    }
    for (name, expected), found in zip(predicted.items(), _measured_us(work, peers, device)):
        if not expected / TOLERANCE <= found <= expected * TOLERANCE:
            return f"{name} takes {found:.0f} us here, where it predicts {expected:.0f} us"
    return None


def _work(peers: Peers) -> Work:
    """A down projection and an exchange of its results: alike long, and longer than the host takes to launch them."""
    shape = Shape(hidden=2048, intermediate=1024, experts=8 * peers.size, top_k=4, tokens=4096)
    plan = balanced(shape, peers.size)
    plan = plan.but(returns=choose_returns(TileOverlapConfig(combine="rows"), plan.tally, shape.row_bytes))
    return Work(stages_of(shape, plan.returns)[1], plan, shape)


def _measured_us(work: Work, peers: Peers, device: torch.device) -> list[float]:
    """Of the GEMM and the exchange, the slowest rank's median."""
    plan, stage = work.plan, work.stage
    # The job's own random numbers stay as they are. Zeros would need less power than numbers do.
    generator = torch.Generator(device).manual_seed(0)
    rows, weights = (
        torch.randn(*size, stage.k, device=device, dtype=torch.bfloat16, generator=generator)
        for size in ((plan.num_rows,), (len(plan.expert_counts), stage.n))
    )
    ends = torch.tensor(plan.expert_counts, device=device).cumsum(0, dtype=torch.int32)

    def multiply() -> torch.Tensor:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    results, received = multiply(), plan.routes_between[peers.rank]
    sent = [row[peers.rank] for row in plan.routes_between]
    home = results.new_empty(sum(received), stage.n)
    steps = (
        multiply,
        lambda: dist.all_to_all_single(home, results, received, sent, group=peers.group),
    )
    found = torch.tensor([_median_us(step) for step in steps], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peers.group)
    return found.tolist()


def _median_us(step: Callable[[], object]) -> float:
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times)[SAMPLES // 2] * 1e3
