"""Times training steps of a transformer with MoE layers under DeepSpeed's engine: forward, backward, optimizer.

One engine an arm, all in one process: ZeRO-1, bf16, AdamW. Two groups of arms, each with equal weights, data and
routing at the first step: DeepSpeed's layers in a small model (stock, sequential, ours), and a Hugging Face model that
AutoEP converts (autoep_fused, and ours_autoep on our stages). The equality gate, on what the first MoE layer of each
arm returns, comes first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import distributed as dist
from torch import nn

from .arms import AUTOEP_FUSED, autoep_engine, dtype_on, native, without
from .measure import TOLERANCE, interleaved, on_all_ranks, summary
from .shapes import LayerShape

# Arm -> backend.
NATIVE = {"stock": None, "sequential": "sequential", "ours": "auto"}
AUTOEP = {"autoep_fused": None, "ours_autoep": "auto"}
SEQ_LEN = 2048


class Attention(nn.Module):
    """Causal self-attention without positions, which take no time worth measuring; [B, S, H] -> [B, S, H]."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: LayerShape, device: torch.device, dtype: torch.dtype, backend: str | None):
        super().__init__()
        with torch.device(device):
            self.attention_norm, self.moe_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
            self.attention = Attention(shape.hidden, shape.hidden // 128 or 1)
        self.moe = native(shape, device, dtype, backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, l_aux, _ = self.moe(self.moe_norm(x))
        return x + y, l_aux


class Model(nn.Module):
    def __init__(self, shape: LayerShape, layers: int, device: torch.device, dtype, backend: str | None):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(shape, device, dtype, backend) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        auxiliary = 0.0
        for block in self.blocks:
            x, l_aux = block(x)
            auxiliary = auxiliary + l_aux
        return x.float().square().mean() + 0.01 * auxiliary


def run(shape: LayerShape, options: argparse.Namespace, device: torch.device) -> dict:
    """One shape's record: its gate, and the times where that is green."""
    seq_len = min(SEQ_LEN, shape.tokens)
    generator = torch.Generator(device).manual_seed(10 + dist.get_rank())
    size = (shape.tokens // seq_len, seq_len)
    x = torch.randn(*size, shape.hidden, device=device, dtype=dtype_on(device), generator=generator)
    ids = torch.randint(0, 512, size, device=device, generator=generator)
    reasons = {name: reason for name in AUTOEP if (reason := without(AUTOEP_FUSED, device))}
    engines = {name: engine_of(shape, name, options.layers, device) for name in options.arms if name not in reasons}

    def loss_of(name: str) -> torch.Tensor:
        return engines[name](x) if name in NATIVE else engines[name](input_ids=ids, labels=ids).loss

    def step(name: str, _: int) -> None:
        engines[name].backward(loss_of(name))
        engines[name].step()

    first = {name: first_forward(engine, partial(loss_of, name)) for name, engine in engines.items()}
    gate = equality_gate({name: rows for name, (_, rows) in first.items()}, device)
    times = interleaved(list(engines), step, options.samples, device) if gate["passed"] else {}
    return {
        "layers": options.layers,
        "skipped": {name: reason for name, reason in reasons.items() if name in options.arms},
        "gate": gate,
        "first_losses": {name: loss for name, (loss, _) in first.items()},
        "step_ms": {name: summary(values) for name, values in times.items()},
    }


def equality_gate(first_rows: dict[str, torch.Tensor], device: torch.device) -> dict:
    """Each arm's first MoE layer, which all of a group give the same input, against that of the group's first arm."""
    errors = {}
    for group in (NATIVE, AUTOEP):
        first, *others = [name for name in group if name in first_rows] or [None]
        for name in others:
            expected = first_rows[first].float()
            errors[f"{name}_vs_{first}"] = ((first_rows[name].float() - expected).norm() / expected.norm()).item()
    return {"passed": on_all_ranks(all(error <= TOLERANCE for error in errors.values()), device), **errors}


def first_forward(engine: deepspeed.DeepSpeedEngine, loss_of: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """The loss, and what the first MoE layer returns."""
    layer = next(module for module in engine.module.modules() if isinstance(module, (MoE, AutoEPMoELayer)))
    outputs = []
    hook = layer.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    with torch.no_grad():
        loss = loss_of().item()
    hook.remove()
    return loss, outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]


def engine_of(shape: LayerShape, name: str, layers: int, device: torch.device) -> deepspeed.DeepSpeedEngine:
    """The engine of an arm."""
    dtype = dtype_on(device)
    if name in AUTOEP:
        return autoep_engine(shape, layers, device, dtype, AUTOEP_FUSED, AUTOEP[name], engine_config(dtype))
    model = Model(shape, layers, device, dtype, NATIVE[name])
    trained = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, **engine_config(dtype)}
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def engine_config(dtype: torch.dtype) -> dict:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 1},
    }


def table(record: dict) -> str:
    shape, medians = record["shape"], {name: times["median"] for name, times in record["step_ms"].items()}
    lines = [
        f"{shape['name']}: {record['layers']} layers, {shape['tokens']} tokens a rank, {record['ranks']} ranks, ms"
    ]
    lines += [f"  {name} is skipped: {reason}" for name, reason in record["skipped"].items()]
    if not record["gate"]["passed"]:
        return "\n".join([*lines, f"  equality gate FAILED, nothing timed: {record['gate']}"])
    if record["smoke_test"]:
        lines.append("  a smoke test on CPU, not a result")
    for name, times in record["step_ms"].items():
        ours = "ours" if name in NATIVE else "ours_autoep"
        gain = f", {ours} {medians[name] / medians[ours]:.2f}x as fast" if ours in medians and name != ours else ""
        lines.append(
            f"  {name:12s} {times['median']:9.3f} (p10 {times['p10']:.3f}, p90 {times['p90']:.3f}), first loss "
            f"{record['first_losses'][name]:.4f}{gain}"
        )
    return "\n".join(lines)
