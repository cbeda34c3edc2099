"""Times one MoE layer, forward and forward + backward, against what DeepSpeed users have today.

All arms in one process, same weights, same router, same inputs; dropless; expert parallel over all ranks. Inputs rotate
through more memory than the L2 cache holds. The equality gate comes first: on a red gate no time is taken. Routing is
part of the layer in every arm; AutoEP's router multiplies in bf16, so that a few near ties fall otherwise: "routes
moved" says how many. Roof: the expert GEMMs alone (six grouped GEMMs of this shape through torch).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.moe.layer import MoE
from torch import distributed as dist
from torch import nn

from .arms import (
    AUTOEP_FUSED,
    Chunks,
    autoep,
    backend_of,
    dtype_on,
    exact_output,
    expert_counts,
    native,
    output_of,
    without,
)
from .measure import TOLERANCE, interleaved, on_all_ranks, summary, synchronize
from .options import CHUNKS
from .shapes import LayerShape

# What the layer should gain at least, forward + backward, over each arm.
GOALS = {
    "qwen3-30b": {"stock": 8.0, "autoep_fused": 2.3},
    "olmoe": {"stock": 4.6, "autoep_fused": 1.9},
    "mixtral": {"stock": 1.37, "autoep_fused": 1.25},
}
AUTOEP_ARMS = {"autoep": ({}, None), "autoep_fused": (AUTOEP_FUSED, None), "ours_autoep": ({}, "auto")}
NUM_INPUTS = 4


def run(shape: LayerShape, options: argparse.Namespace, device: torch.device) -> dict:
    """One shape's record: its gate, and the times where that is green."""
    source, judge, arms, skipped = layers_of(shape, options.arms, device)
    generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
    size, kind = (1, shape.tokens, shape.hidden), dict(device=device, dtype=dtype_on(device))
    inputs = [torch.randn(size, **kind, generator=generator).requires_grad_() for _ in range(NUM_INPUTS)]
    grad = torch.randn(size, **kind, generator=generator)
    against = "stock" if judge is source else "reference"
    record = {
        "skipped": skipped,
        "routing": routing(arms, judge, inputs[0]),
        "gate": equality_gate(arms, judge, against, shape, inputs[0], grad),
        "arms": {},
        "goals": GOALS.get(shape.name, {}),
    }
    record["backends"] = {name: backend for name, arm in arms.items() if (backend := backend_of(arm))}
    # A token or two may fall otherwise by float32 rounding, not more.
    record["gate"]["passed"] &= record["routing"]["moved"]["ours"] <= 1e-3
    if record["gate"]["passed"]:
        options.out.mkdir(parents=True, exist_ok=True)
        breakdown = options.out / f"{shape.name}-breakdown.txt" if options.breakdown else None
        record["arms"] = measures(arms, inputs, grad, options.samples, device, breakdown)
    if record["gate"]["passed"] and device.type == "cuda":
        record["gemms_alone_ms"] = gemms_alone(shape, arms["ours"], inputs[0], options.samples, device)
    return record


def layers_of(
    shape: LayerShape, names: tuple[str, ...], device: torch.device
) -> tuple[MoE, MoE, dict[str, nn.Module], dict[str, str]]:
    """DeepSpeed's layer, the layer that ours must equal, the arms, and why others are skipped; all of one's weights."""
    dtype = dtype_on(device)
    source = native(shape, device, dtype, None)
    arms, skipped = {}, {}
    if "stock" in names:
        arms["stock"] = source
    for name, (options, backend) in AUTOEP_ARMS.items():
        if name in names and (reason := without(options, device)):
            skipped[name] = reason
        elif name in names:
            arms[name] = autoep(shape, device, dtype, options, source, backend)
    if "sequential" in names:
        arms["sequential"] = native(shape, device, dtype, "sequential")
    if chunks := {name: int(found[1]) for name in names if (found := CHUNKS.fullmatch(name))}:
        pieces = native(shape, device, dtype, "sequential")
        arms |= {name: Chunks(pieces, count) for name, count in chunks.items()}
    arms["ours"] = native(shape, device, dtype, "auto")
    # DeepSpeed's own layer pads every expert to the fullest one, for which many tokens a rank leave no memory.
    judge = source if "stock" in names else native(shape, device, dtype, "reference")
    # There is no engine: ZeRO's gradient hooks also run in a plain backward (bucketing, at its end reduction), and the
    # layer alone is what is timed.
    modules = (module for arm in (source, judge, *arms.values()) for module in arm.modules())
    for layer in {module for module in modules if isinstance(module, MoE)}:
        layer.set_deepspeed_parallelism()
    return source, judge, arms, skipped


def measures(
    arms: dict[str, nn.Module],
    inputs: list[torch.Tensor],
    grad: torch.Tensor,
    samples: int,
    device: torch.device,
    breakdown: Path | None,
) -> dict[str, dict]:
    """Times and peak memory of each arm; ``breakdown`` is written on the way."""
    parameters = {name: list(arm.parameters()) for name, arm in arms.items()}

    def forward(name: str, i: int) -> None:
        with torch.no_grad():
            output_of(arms[name], inputs[i % NUM_INPUTS])

    def forward_backward(name: str, i: int) -> None:
        for leaf in (inputs[i % NUM_INPUTS], *parameters[name]):
            leaf.grad = None
        output_of(arms[name], inputs[i % NUM_INPUTS]).backward(grad)

    found: dict[str, dict] = {name: {} for name in arms}
    for label, step in (("forward_ms", forward), ("forward_backward_ms", forward_backward)):
        for name, times in interleaved(list(arms), step, samples, device).items():
            found[name][label] = summary(times)
    for name in arms:
        leaves = [inputs[0], *parameters[name]]
        found[name]["peak_gib"] = peak_gib(lambda arm=name: forward_backward(arm, 0), leaves, device)
    if breakdown:
        kernel_table(lambda i: forward_backward("ours", i), breakdown, device)
    return found


def routing(arms: dict, judge, x: torch.Tensor) -> dict:
    """How uneven the routing is over all ranks, and the share of routes that an arm gives to another expert (net)."""
    counts = expert_counts(judge, x)
    moved = {name: (expert_counts(arm, x) - counts).abs().sum() / 2 / counts.sum() for name, arm in arms.items()}
    return {
        "fullest_over_mean": (counts.max() / counts.float().mean()).item(),
        "rows_by_rank": counts.view(dist.get_world_size(), -1).sum(1).tolist(),
        "moved": {name: share.item() for name, share in moved.items()},
    }


def equality_gate(arms: dict, judge, against: str, shape: LayerShape, x: torch.Tensor, grad: torch.Tensor) -> dict:
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
        report[f"output_vs_{against}"] <= TOLERANCE
        and report[f"gradients_vs_{against}"] <= TOLERANCE
        and report["output_vs_float32"] <= 2 * report[f"{against}_output_vs_float32"] + 1e-5
    )
    return {"passed": on_all_ranks(passed, x.device), **report}


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


def gemms_alone(shape: LayerShape, ours, x: torch.Tensor, samples: int, device: torch.device) -> dict:
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
