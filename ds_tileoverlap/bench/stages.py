"""Times the four stages of the overlap backend in which a GEMM and an exchange are one kernel, each against its parts.

    in          tokens travel => gate and up projection        in back     gradients of the rows => return
    down back   gradients travel => down projection, back      down        down projection => return

Arms, all on the same routing and rows, interleaved in one process; times are maxima over the ranks:

    torch       torch's grouped GEMM alone
    gemm        the package's GEMM alone
    sequential  the package's sequential stages: torch's grouped GEMM, exchange, sums
    overlap     the overlapped stage
    serial      (down) torch's grouped GEMM, then NCCL's all-to-all of every remote row
    rows, sums  (down) the overlapped stage up to the arrival of all rows, with so many SMs for couriers of their own

The equality gate, overlap against sequential, comes first. Each arm is replayed from a CUDA graph: the device is timed,
not how fast a host launches; with ``--launch`` both are. Roof of a stage: the larger of torch's grouped GEMM and its
bytes on the link at 378 GB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import distributed as dist

from .. import combine, dispatch, overlap_group, overlap_stages, symmetric_layout
from ..config import TileOverlapConfig
from ..exchange import peers_of
from ..overlap_stages import Operand
from ..route import Routes
from ..schedule import ARRIVALS
from ..weight_maps import WeightMaps
from .measure import TOLERANCE, interleaved, on_all_ranks, summary
from .shapes import StageShape

LINK = 378e9
# How many times as fast as serial the down projection and its return should be.
GOALS = {"qwen3-30b": 2.15, "olmoe": 2.1, "dsv3-like": 1.55, "paper-like": 1.9, "mixtral": 1.15, "trans-xl": 2.0}
DTYPE = torch.bfloat16


def run(shape: StageShape, options: argparse.Namespace, device: torch.device) -> dict:
    """One shape's record: its gate, and the times where that is green."""
    return Stages(shape, device).record(options.comm_sms, options.samples, options.launch)


class Stages:
    """One shape's routing, rows and weights, and its arms."""

    def __init__(self, shape: StageShape, device: torch.device):
        self.shape, self.rank, world = shape, dist.get_rank(), dist.get_world_size()
        hidden, inner, local = shape.hidden, shape.intermediate, shape.experts // world
        self.peers = peers_of(dist.group.WORLD, device, None, shape.name)
        self.group = overlap_group.group_of(self.peers, device)
        if self.group.op is None:
            raise SystemExit(f"the overlap backend cannot run here, as {self.group.reason}")
        self.generator = torch.Generator(device).manual_seed(5 + self.rank)
        self.device, self.width = device, hidden
        self.routes = self._routes(world, local)
        self.plan, self.maps = self.plan_of("auto"), WeightMaps()
        num_rows = sum(self.plan.expert_counts)
        self.weights_in = self._random(local, 2 * inner, hidden) * 0.02
        self.weights_down = self._random(local, hidden, inner) * 0.02
        self.tokens = self._random(shape.tokens, hidden)
        self.hidden_rows, self.wide_rows = self._random(num_rows, inner), self._random(num_rows, 2 * inner)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=DTYPE, generator=self.generator)

    def _routes(self, world: int, local: int) -> Routes:
        """Uniform scores, a little more for later experts of a rank, and ``skew`` more for those of rank 0."""
        scores = torch.rand(self.shape.tokens, self.shape.experts, device=self.device, generator=self.generator)
        scores += torch.linspace(-0.15, 0.15, local, device=self.device).repeat(world)
        scores[:, :local] += self.shape.skew
        chosen = scores.topk(self.shape.top_k, 1).indices.int()
        return Routes(chosen, torch.full(chosen.shape, 1 / chosen.shape[1], device=self.device), None, None)

    def plan_of(self, how: str):
        config = TileOverlapConfig(enabled=True, combine=how)
        return symmetric_layout.Counting(
            self.routes, self.shape.experts, self.peers, self.group, config, self.width * 2, True
        ).finish()

    def run_of(self, plan, width: int, returns, comm_sms: int = 0) -> overlap_stages.Run:
        config = TileOverlapConfig(enabled=True, comm_sms=comm_sms)
        return overlap_stages.run_of(plan, self.group, config, self.maps, self.width * 2, [(width, returns)])

    def record(self, comm_sms: tuple[int, ...], samples: int, launch: bool) -> dict:
        arms, errors = self.arms_and_errors(comm_sms)
        passed = on_all_ranks(all(error <= TOLERANCE for error in errors.values()), self.device)
        tally, sums = self.plan.tally, self.plan.returns.sums
        arrive, back = tally.remote_sends, tally.remote_sends if sums else tally.remote_routes
        each_way = self.plan.peers.size * LINK / (self.width * 2)
        return {
            "replayed": not launch,
            "returns": "sums" if sums else "rows",
            "gate": {"passed": passed},
            "errors_vs_sequential": errors,
            "link_ms": {"arrive": arrive / each_way * 1e3, "return": back / each_way * 1e3},
            "rows_link_ms": tally.remote_routes / each_way * 1e3,
            "times_ms": self.times_ms(arms, samples, launch) if passed else {},
            "goal": GOALS.get(self.shape.name),
        }

    def arms_and_errors(self, comm_sms: tuple[int, ...]) -> tuple[dict[str, Callable], dict[str, float]]:
        """``"STAGE: ARM"`` -> a call of it; stage -> relative difference of overlap and sequential on this rank."""
        arms, errors = {}, {}
        for name, weights, transposed, rows in (
            ("in", self.weights_in, False, None),
            ("down", self.weights_down, False, self.hidden_rows),
            ("down back", self.weights_down, True, None),
            ("in back", self.weights_in, True, self.wide_rows),
        ):
            operand = Operand(name, [(0, len(weights), weights)], transposed)
            found = self.arrival_arms(operand) if rows is None else self.return_arms(operand, rows)
            if name == "down":
                found |= self.return_only_arms(operand, rows, comm_sms)
            got, expected = found["overlap"]().float(), found["sequential"]().float()
            errors[name] = ((got - expected).norm() / expected.norm()).item()
            arms |= {f"{name}: {arm}": step for arm, step in found.items()}
        return arms, errors

    def times_ms(self, arms: dict[str, Callable], samples: int, launch: bool) -> dict[str, dict]:
        # Buffers that grow move: each arm finds its largest before any graph keeps an address.
        for step in arms.values():
            step()
        if not launch:
            memory = torch.cuda.graph_pool_handle()
            arms = {name: captured(step, memory) for name, step in arms.items()}
        times = interleaved(list(arms), lambda name, i: arms[name](), samples, self.device)
        overlap_group.check_failure(self.group.pool.failure, self.peers)
        return {name: summary(values) for name, values in times.items()}

    def grouped_mm(self, rows: torch.Tensor, operand: Operand) -> torch.Tensor:
        weights = operand.stack[0][2]
        return F.grouped_mm(
            rows, weights if operand.transposed else weights.transpose(1, 2), offs=self.plan.row_offsets[1:]
        )

    def gemm_arms(self, operand: Operand, rows: torch.Tensor, returns) -> dict[str, Callable]:
        run, result = self.run_of(self.plan, operand.width, returns), rows.new_empty(len(rows), operand.width)
        return {
            "torch": lambda: self.grouped_mm(rows, operand),
            "gemm": lambda: overlap_stages.multiply(run, operand.width, returns, [(rows, operand)], result),
        }

    def arrival_arms(self, operand: Operand) -> dict[str, Callable]:
        plan, run = self.plan, self.run_of(self.plan, operand.width, ARRIVALS)
        rows = dispatch.send_tokens(self.tokens, plan, "dispatch")
        return self.gemm_arms(operand, rows, ARRIVALS) | {
            "sequential": lambda: self.grouped_mm(dispatch.send_tokens(self.tokens, plan, "dispatch"), operand),
            "overlap": lambda: overlap_stages.project_arriving(self.tokens, [operand], plan, run)[0][0],
        }

    def return_arms(self, operand: Operand, rows: torch.Tensor) -> dict[str, Callable]:
        plan, run = self.plan, self.run_of(self.plan, operand.width, self.plan.returns)
        return self.gemm_arms(operand, rows, plan.returns) | {
            "sequential": lambda: combine.return_rows(self.grouped_mm(rows, operand), plan, "combine"),
            "overlap": lambda: overlap_stages.return_while_computed(
                [(rows, operand)], plan, run, nullcontext, "combine"
            ),
        }

    def return_only_arms(self, operand: Operand, rows: torch.Tensor, comm_sms: tuple[int, ...]) -> dict[str, Callable]:
        """The return up to the arrival of all rows: one token's sum waits for all of them."""
        received = self.plan.routes_between[self.rank]
        sent = [row[self.rank] for row in self.plan.routes_between]
        home = rows.new_empty(sum(received), operand.width)
        arms = {"serial": lambda: dist.all_to_all_single(home, self.grouped_mm(rows, operand), received, sent)}
        for how in ("rows", "sums"):
            plan = self.plan_of(how)
            arms |= {f"{how} {num_sms}": self.return_only(plan, operand, rows, num_sms) for num_sms in comm_sms}
        return arms

    def return_only(self, plan, operand: Operand, rows: torch.Tensor, comm_sms: int = 0) -> Callable:
        """A call of the return by a plan, with one token's sum."""
        plan = plan.but(slots=plan.slots[:1])
        run = self.run_of(plan, operand.width, plan.returns, comm_sms)
        return lambda: overlap_stages.return_while_computed([(rows, operand)], plan, run, nullcontext, "combine")


def captured(step: Callable, memory) -> Callable:
    """The step as a CUDA graph; results of all arms share one memory, as nobody reads them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        step()
    return graph.replay


def table(record: dict) -> str:
    us = {name: value["median"] * 1e3 for name, value in record["times_ms"].items()}
    goal = f" (goal {record['goal']}x)" if record["goal"] else ""
    lines = [
        f"{record['shape']['name']}: {record['ranks']} ranks, {record['environment']['device']}, {record['returns']}"
    ]
    if not record["gate"]["passed"]:
        return f"{lines[0]}\n  equality gate FAILED, nothing timed: {record['errors_vs_sequential']}"
    lines.append(f"  {'us':10s} {'torch':>7s} {'gemm':>7s} {'link':>7s} {'sequential':>10s} {'overlap':>8s}")
    for stage in ("in", "down", "down back", "in back"):
        grouped_mm, gemm, sequential, mine = (
            us[f"{stage}: {arm}"] for arm in ("torch", "gemm", "sequential", "overlap")
        )
        link = record["link_ms"]["return" if stage in ("down", "in back") else "arrive"] * 1e3
        exposed = (mine - gemm) / max(sequential - grouped_mm, 1e-3)
        lines.append(
            f"  {stage:10s} {grouped_mm:7.0f} {gemm:7.0f} {link:7.0f} {sequential:10.0f} {mine:8.0f}"
            f"  {sequential / mine:.2f}x, {max(grouped_mm, link) / mine:.2f} of the roof, exposed {exposed:.0%} of"
            f" sequential's, error {record['errors_vs_sequential'][stage]:.1e}"
        )
    serial = us["down: serial"]
    lines.append(f"  serial {serial:.0f} us, every row on the link {record['rows_link_ms'] * 1e3:.0f} us{goal}")
    for name, value in us.items():
        if name.startswith(("down: rows", "down: sums")):
            lines.append(f"  {name[6:]:10s} {value:7.0f}  {serial / value:.2f}x over serial")
    return "\n".join(lines)
