"""Times the down projection and the return of its rows, one after the other and overlapped.

    torchrun --standalone --nproc_per_node=2 examples/benchmark_return.py --shapes SHAPES --out DIR

(SHAPES: configs/benchmark_return.yaml)

Arms, all on the same routing and rows, interleaved in one process; times are maxima over the ranks:

    serial      torch's grouped GEMM, then NCCL's all-to-all of every remote row
    sequential  the package's sequential stages: grouped GEMM, sums, all-to-all, sums
    gemm        the package's GEMM alone
    rows, sums  the overlapped stage up to the arrival of all rows; the number is comm_sms, 0 for couriers in the GEMM
    full        the same with the sum at the owner, as ``sequential`` has it

Roof: the larger of torch's grouped GEMM and the remote rows' time on the link at 378 GB/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
import yaml
from benchmark import environment, interleaved, summary
from torch import distributed as dist

from ds_tileoverlap import overlap_group, overlap_stages, symmetric_layout
from ds_tileoverlap.combine import return_rows
from ds_tileoverlap.config import TileOverlapConfig
from ds_tileoverlap.exchange import peers_of
from ds_tileoverlap.route import Routes
from ds_tileoverlap.weight_maps import WeightMaps

LINK = 378e9
# Times over serial that design and paper aim at.
GOALS = {"qwen3-30b": 2.15, "olmoe": 2.1, "dsv3-like": 1.55, "paper-like": 1.9, "mixtral": 1.15, "trans-xl": 2.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True, help="YAML list of shapes")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON record a shape")
    parser.add_argument("--comm-sms", default="0,8", help="comma-separated numbers of SMs for couriers")
    parser.add_argument("--panels", type=int, default=2, help="panels of the sums")
    parser.add_argument("--samples", type=int, default=6, help="bursts of iterations of each arm")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    deepspeed.init_distributed("nccl", verbose=False)
    for shape in yaml.safe_load(arguments.shapes.read_text()):
        record = run(
            shape, [int(n) for n in arguments.comm_sms.split(",")], arguments.panels, arguments.samples, device
        )
        if dist.get_rank() == 0:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"return-{shape['name']}.json").write_text(json.dumps(record, indent=1) + "\n")
            print(table(record), flush=True)
    dist.destroy_process_group()
    return 0


def run(shape: dict, comm_sms: list[int], panels: int, samples: int, device: torch.device) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, inner, experts, top_k = (shape[name] for name in ("hidden", "intermediate", "experts", "top_k"))
    peers = peers_of(dist.group.WORLD, device, None, shape["name"])
    group = overlap_group.group_of(peers, device)
    if group.op is None:
        raise SystemExit(f"the overlap backend cannot run here, as {group.reason}")
    generator = torch.Generator(device).manual_seed(5 + rank)
    local = experts // world
    scores = torch.rand(shape["tokens"], experts, device=device, generator=generator)
    scores += torch.linspace(-0.15, 0.15, local, device=device).repeat(world)
    scores[:, :local] += shape.get("skew", 0.0)
    chosen = scores.topk(top_k, 1).indices.int()
    routes = Routes(chosen, torch.full(chosen.shape, 1 / top_k, device=device), None, None)

    def plan_of(combine: str):
        config = TileOverlapConfig(enabled=True, combine=combine)
        return symmetric_layout.layout(routes, experts, peers, group, config, hidden * 2, True)

    plan = plan_of("rows")
    num_rows = sum(plan.expert_counts)
    rows = torch.randn(num_rows, inner, device=device, dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(local, hidden, inner, device=device, dtype=torch.bfloat16, generator=generator) * 0.02
    operand = overlap_stages.Operand("down", [(0, local, weight)], transposed=False)
    received, sent = plan.routes[rank].sum(1).tolist(), plan.routes[:, rank].sum(1).tolist()
    home = torch.empty(sum(received), hidden, device=device, dtype=torch.bfloat16)

    def grouped_mm():
        return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=plan.row_offsets[1:])

    def prepared(its_plan, num_sms: int = 0):
        config = TileOverlapConfig(enabled=True, comm_sms=num_sms)
        its_run = overlap_stages.Run(group, config, WeightMaps(), its_plan, hidden * 2)
        its_run.prepare(its_plan, {(hidden, its_plan.returns)})
        return its_run

    def overlapped(combine: str, num_sms: int, full: bool):
        its_plan = plan_of(combine)
        if combine == "sums":
            its_plan = dataclasses.replace(its_plan, returns=dataclasses.replace(its_plan.returns, num_panels=panels))
        its_run = prepared(its_plan, num_sms)
        # One token's sum still waits for all rows.
        timed = its_plan if full else dataclasses.replace(its_plan, slots=its_plan.slots[:1])
        return lambda: overlap_stages.return_while_computed([(rows, operand)], timed, its_run, no_stages)

    def gemm_alone():
        its_run, result = prepared(plan), rows.new_empty(num_rows, hidden)
        return lambda: overlap_stages.multiply(its_run, its_run.tiles(hidden, plan.returns), [(rows, operand)], result)

    exact = return_rows(grouped_mm(), plan, "combine").float()
    arms = {
        "torch": grouped_mm,
        "serial": lambda: dist.all_to_all_single(home, grouped_mm(), received, sent),
        "sequential": lambda: return_rows(grouped_mm(), plan, "combine"),
        "gemm": gemm_alone(),
    }
    errors = {}
    for combine in ("rows", "sums"):
        for num_sms in comm_sms:
            name = f"{combine} {num_sms}"
            arms[name] = overlapped(combine, num_sms, full=False)
            full = overlapped(combine, num_sms, full=True)
            errors[name] = ((full().float() - exact).norm() / exact.norm()).item()
            if num_sms == comm_sms[0]:
                arms[f"{combine} full"] = full
    times = interleaved(list(arms), lambda name, i: arms[name](), samples, device)
    overlap_group.check_failure(group.pool.failure, peers)
    link_ms = (sum(sent) - sent[rank]) * hidden * 2 / LINK * 1e3
    return {
        "shape": shape,
        "ranks": world,
        "environment": environment(device),
        "errors_vs_sequential": errors,
        "link_ms": link_ms,
        "times_ms": {name: summary(values) for name, values in times.items()},
        "goal": GOALS.get(shape["name"]),
    }


def no_stages(name: str) -> nullcontext:
    return nullcontext()


def table(record: dict) -> str:
    times = {name: value["median"] for name, value in record["times_ms"].items()}
    goal = f" (goal {record['goal']}x)" if record["goal"] else ""
    lines = [f"{record['shape']['name']}: {record['ranks']} ranks, {record['environment']['device']}{goal}"]
    roof = max(times["torch"], record["link_ms"])
    for name, value in times.items():
        gain = f"{times['serial'] / value:5.2f}x over serial, {value / roof:4.2f} of the roof"
        error = f", error {record['errors_vs_sequential'][name]:.1e}" if name in record["errors_vs_sequential"] else ""
        lines.append(
            f"  {name:11s} {value * 1e3:8.0f} us" + (f"   {gain}{error}" if name[:4] in ("rows", "sums") else "")
        )
    return "\n".join([*lines, f"  link        {record['link_ms'] * 1e3:8.0f} us"])


if __name__ == "__main__":
    sys.exit(main())
