"""Times one MoE layer, forward and forward + backward, against what DeepSpeed users have today.

    torchrun --standalone --nproc_per_node=2 examples/benchmark.py --shapes configs/benchmark_shapes.yaml --out DIR

(with this package installed or its root on PYTHONPATH; AutoEP's arms need transformers and are skipped without it)

Protocol: all arms in one process, same weights, same router, same inputs; dropless; expert parallel over all ranks.
A sample is a burst of back-to-back iterations of one arm, each between two events, of which the first is dropped; arms
alternate burst by burst, inputs rotate through more memory than the L2 cache holds; times are maxima over the ranks,
then medians over samples. The equality gate comes first: on a red gate no time is printed. Routing is part of the layer
in every arm; AutoEP's router multiplies in bf16, so that a few near ties fall otherwise: "routes moved" says how many.
Roof: the expert GEMMs alone (six grouped GEMMs of this shape through torch).
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
import triton
import yaml
from bench_arms import AUTOEP_FUSED, Chunks, Shape, autoep, backend_of, exact_output, expert_counts, native, output_of
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import distributed as dist

# What the layer should gain at least, forward + backward, over each arm.
GOALS = {
    "qwen3-30b": {"stock": 8.0, "autoep_fused": 2.3},
    "olmoe": {"stock": 4.6, "autoep_fused": 1.9},
    "mixtral": {"stock": 1.37, "autoep_fused": 1.25},
}
AUTOEP_ARMS = {"autoep": ({}, None), "autoep_fused": (AUTOEP_FUSED, None), "ours_autoep": ({}, "auto")}
BURST = 4
NUM_INPUTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True, help="YAML list of shapes")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON record a shape")
    parser.add_argument("--only", help="comma-separated names of shapes")
    parser.add_argument(
        "--arms",
        default="stock,autoep,autoep_fused,sequential,ours_autoep,ours",
        help="comma-separated; ours is always run; ours_autoep is AutoEP's layer converted, chunks_N the sequential "
        "backend on N pieces of the tokens, exchanges of one under the GEMMs of another",
    )
    parser.add_argument("--samples", "--iters", type=int, default=12, help=f"bursts of {BURST} iterations of each arm")
    parser.add_argument("--limit", type=int, default=280, help="seconds for one shape, after which stacks are printed")
    parser.add_argument("--breakdown", action="store_true", help="also write a table of the kernels of ours")
    arguments = parser.parse_args()

    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    on_gpu = torch.cuda.is_available()
    device = torch.device(get_accelerator().current_device_name())
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=arguments.limit)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False, timeout=limit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shapes = [Shape(**entry) for entry in yaml.safe_load(arguments.shapes.read_text())]
    if arguments.only:
        shapes = [shape for shape in shapes if shape.name in arguments.only.split(",")]
    passed = True
    for shape in shapes:
        faulthandler.dump_traceback_later(arguments.limit, exit=True)
        breakdown = arguments.out / f"{shape.name}-breakdown.txt" if arguments.breakdown else None
        record = run(shape, arguments.arms.split(","), arguments.samples, device, breakdown)
        passed &= record["gate"]["passed"]
        if dist.get_rank() == 0:
            (arguments.out / f"{shape.name}.json").write_text(json.dumps(record, indent=1) + "\n")
            print(table(record), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    faulthandler.dump_traceback_later(60, exit=True)
    dist.destroy_process_group()
    return 0 if passed else 1


def run(shape: Shape, names: list[str], samples: int, device: torch.device, breakdown: Path | None = None) -> dict:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = native(shape, device, dtype, None)
    arms, skipped = {}, {}
    if "stock" in names:
        arms["stock"] = source
    for name, (options, backend) in AUTOEP_ARMS.items():
        if name not in names:
            continue
        if importlib.util.find_spec("transformers") is None:
            skipped[name] = "transformers is not installed"
        elif options and device.type != "cuda":
            skipped[name] = "its fused options need a GPU"
        else:
            arms[name] = autoep(shape, device, dtype, options, source, backend)
    if "sequential" in names:
        arms["sequential"] = native(shape, device, dtype, "sequential")
    chunks = {name: int(name.split("_")[1]) for name in names if name.startswith("chunks_")}
    if chunks:
        pieces = native(shape, device, dtype, "sequential")
        arms |= {name: Chunks(pieces, count) for name, count in chunks.items()}
    arms["ours"] = native(shape, device, dtype, "auto")
    # DeepSpeed's own layer pads every expert to the fullest one, for which many tokens a rank leave no memory.
    against = "stock" if "stock" in names else "reference"
    judge = source if against == "stock" else native(shape, device, dtype, "reference")
    # There is no engine: ZeRO's gradient hooks also run in a plain backward (bucketing, at its end reduction), and the
    # layer alone is what is timed.
    for layer in {
        module for arm in (source, judge, *arms.values()) for module in arm.modules() if isinstance(module, MoE)
    }:
        layer.set_deepspeed_parallelism()

    generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
    inputs = [
        torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=dtype, generator=generator).requires_grad_()
        for _ in range(NUM_INPUTS)
    ]
    grad = torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=dtype, generator=generator)
    record = {
        "shape": vars(shape),
        "ranks": dist.get_world_size(),
        "smoke_test": device.type != "cuda",
        "environment": environment(device),
        "skipped": skipped,
        "routing": routing(arms, judge, inputs[0]),
        "gate": equality_gate(arms, judge, against, shape, inputs[0], grad),
        "arms": {},
        "goals": GOALS.get(shape.name, {}),
    }
    record["backends"] = {name: backend for name, arm in arms.items() if (backend := backend_of(arm))}
    # A token or two may fall otherwise by float32 rounding, not more.
    record["gate"]["passed"] &= record["routing"]["moved"]["ours"] <= 1e-3
    if not record["gate"]["passed"]:
        return record
    parameters = {name: list(arm.parameters()) for name, arm in arms.items()}

    def forward(name: str, i: int) -> None:
        with torch.no_grad():
            output_of(arms[name], inputs[i % NUM_INPUTS])

    def forward_backward(name: str, i: int) -> None:
        for leaf in (inputs[i % NUM_INPUTS], *parameters[name]):
            leaf.grad = None
        output_of(arms[name], inputs[i % NUM_INPUTS]).backward(grad)

    for label, step in (("forward_ms", forward), ("forward_backward_ms", forward_backward)):
        for name, times in interleaved(list(arms), step, samples, device).items():
            record["arms"].setdefault(name, {})[label] = summary(times)
    for name in arms:
        leaves = [inputs[0], *parameters[name]]
        record["arms"][name]["peak_gib"] = peak_gib(lambda arm=name: forward_backward(arm, 0), leaves, device)
    if breakdown:
        kernel_table(lambda i: forward_backward("ours", i), breakdown, device)
    if device.type == "cuda":
        record["gemms_alone_ms"] = gemms_alone(shape, arms["ours"], inputs[0], samples, device)
    return record


def routing(arms: dict, judge, x: torch.Tensor) -> dict:
    """How uneven the routing is over all ranks, and the share of routes that an arm gives to another expert (net)."""
    counts = expert_counts(judge, x)
    moved = {name: (expert_counts(arm, x) - counts).abs().sum() / 2 / counts.sum() for name, arm in arms.items()}
    return {
        "fullest_over_mean": (counts.max() / counts.float().mean()).item(),
        "rows_by_rank": counts.view(dist.get_world_size(), -1).sum(1).tolist(),
        "moved": {name: share.item() for name, share in moved.items()},
    }


def equality_gate(arms: dict, judge, against: str, shape: Shape, x: torch.Tensor, grad: torch.Tensor) -> dict:
    """Ours against another layer of its weights (output, x gradient, some weight gradients), both against float32."""

    def run_arm(layer):
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        output = output_of(layer, x)
        output.backward(grad)
        return output.detach()

    def error(got, expected):
        return ((got.float() - expected.float()).norm() / expected.float().norm()).item()

    def sample(layer):
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        picked = [
            layer.deepspeed_moe.gate.wg,
            *(getattr(experts[i], n) for i in (0, -1) for n in ("gate", "up", "down")),
        ]
        return [module.weight.grad for module in picked]

    expected = run_arm(judge)
    expected_grads = [g.clone() for g in (x.grad, *sample(judge))]
    got = run_arm(arms["ours"])
    few = x.detach()[0, :64]
    exact = exact_output(judge, shape, few)
    report = {
        f"output_vs_{against}": error(got, expected),
        f"gradients_vs_{against}": max(error(a, b) for a, b in zip((x.grad, *sample(arms["ours"])), expected_grads)),
        "output_vs_float32": error(got[0, :64], exact),
        f"{against}_output_vs_float32": error(expected[0, :64], exact),
    }
    for name, arm in arms.items():
        if name in AUTOEP_ARMS:
            report[f"{name}_output_vs_float32"] = error(run_arm(arm)[0, :64], exact)
    passed = (
        report[f"output_vs_{against}"] <= 2e-2
        and report[f"gradients_vs_{against}"] <= 2e-2
        and report["output_vs_float32"] <= 2 * report[f"{against}_output_vs_float32"] + 1e-5
    )
    verdict = torch.tensor([int(passed)], device=x.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return {"passed": bool(verdict.item()), **report}


def interleaved(
    names: list[str], step: Callable[[str, int], None], samples: int, device: torch.device
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


def kernel_table(step: Callable[[int], None], path: Path, device: torch.device) -> None:
    """Writes what three steps spend their time on, longest first; rank 0's view."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        for i in range(3):
            step(i)
        synchronize(device)
    if dist.get_rank() == 0:
        order = f"self_{device.type}_time_total"
        rows = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100)
        path.write_text(f"ours, forward + backward, 3 iterations\n{rows}\n")


def peak_gib(step: Callable[[], None], leaves: list, device: torch.device) -> float | None:
    """Most memory of one forward + backward, gradients included, above what was there before; maximum of the ranks."""
    if device.type != "cuda":
        return None
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.tensor([(torch.cuda.max_memory_allocated() - before) / 2**30], device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()


def gemms_alone(shape: Shape, ours, x: torch.Tensor, samples: int, device: torch.device) -> dict:
    """The layer's grouped GEMMs without anything around them, on this routing's row counts."""
    counts = expert_counts(ours, x)
    mine = counts.view(dist.get_world_size(), -1)[dist.get_rank()]
    ends, rows = mine.cumsum(0, dtype=torch.int32), int(mine.sum())
    hidden, inner, num_local = shape.hidden, shape.intermediate, len(mine)
    new = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)  # noqa: E731
    row, middle, wide = new(rows, hidden), new(rows, inner), new(rows, 2 * inner)
    weight_in, weight_out = new(num_local, 2 * inner, hidden), new(num_local, hidden, inner)
    mm = torch.nn.functional.grouped_mm

    def forward():
        mm(row, weight_in.transpose(1, 2), offs=ends)
        mm(middle, weight_out.transpose(1, 2), offs=ends)

    def step(name: str, _: int) -> None:
        forward()
        if name == "forward_backward":
            mm(row, weight_out, offs=ends)
            mm(wide, weight_in, offs=ends)
            mm(row.t(), middle, offs=ends)
            mm(wide.t(), row, offs=ends)

    times = interleaved(["forward", "forward_backward"], step, samples, device)
    return {name: statistics.median(values) for name, values in times.items()}


def summary(times: list[float]) -> dict:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
        "samples": len(ordered),
    }


def environment(device: torch.device) -> dict:
    found = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "deepspeed": deepspeed.__version__,
        "command": " ".join(sys.argv).split(" --out")[0],
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if importlib.util.find_spec("transformers"):
        import transformers

        found["transformers"] = transformers.__version__
    if commit := first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"):
        found["commit"] = commit
    return found


def first_line(*command: str) -> str | None:
    """Of a command's output; ``None`` where it is missing, fails or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def table(record: dict) -> str:
    shape = record["shape"]
    lines = [
        f"{shape['name']}: H {shape['hidden']}, I {shape['intermediate']}, E {shape['experts']}, k {shape['top_k']}, "
        f"{shape['tokens']} tokens a rank, {record['ranks']} ranks, {record['environment']['device']}; "
        f"fullest expert {record['routing']['fullest_over_mean']:.2f}x the mean"
    ]
    lines.append("  routes moved: " + ", ".join(f"{k} {v:.1e}" for k, v in record["routing"]["moved"].items()))
    lines.append("  backends: " + ", ".join(f"{name} {backend}" for name, backend in record["backends"].items()))
    lines += [f"  {name} is skipped: {reason}" for name, reason in record["skipped"].items()]
    if not record["gate"]["passed"]:
        return "\n".join([*lines, f"  equality gate FAILED, nothing timed: {record['gate']}"])
    lines.append(f"  gate: {', '.join(f'{k} {v:.1e}' for k, v in record['gate'].items() if k != 'passed')}")
    if record["smoke_test"]:
        lines.append("  a smoke test on CPU, not a result")
    lines.append(f"  {'arm':14s} {'forward':>9s} {'fwd+bwd':>9s} {'p10':>8s} {'p90':>8s} {'peak GiB':>9s}")
    median = {name: arm["forward_backward_ms"]["median"] for name, arm in record["arms"].items()}
    own = [name for name in ("ours", "ours_autoep") if name in median]
    for name, arm in record["arms"].items():
        both = arm["forward_backward_ms"]
        peak = f"{arm['peak_gib']:9.2f}" if arm["peak_gib"] is not None else " " * 9
        gains = "" if name in own else ", ".join(f"{our} {median[name] / median[our]:.2f}x as fast" for our in own)
        goal = record["goals"].get(name)
        lines.append(
            f"  {name:14s} {arm['forward_ms']['median']:9.3f} {both['median']:9.3f} "
            f"{both['p10']:8.3f} {both['p90']:8.3f} {peak}  {gains}" + (f" (goal {goal}x)" if goal else "")
        )
    if alone := record.get("gemms_alone_ms"):
        lines.append(f"  {'GEMMs alone':14s} {alone['forward']:9.3f} {alone['forward_backward']:9.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
