"""Times training steps of a transformer with MoE layers under DeepSpeed's engine: forward, backward, optimizer.

    torchrun --standalone --nproc_per_node=2 examples/benchmark_step.py --shapes configs/benchmark_shapes.yaml --out DIR

One engine an arm, all in one process: ZeRO-1, bf16, AdamW. Two groups of arms, each with equal weights, data and
routing at the first step: DeepSpeed's layers in a small model (stock, sequential, ours), and a Hugging Face model that
AutoEP converts (autoep_fused, and ours_autoep on our stages). Arms alternate burst by burst as in ``benchmark.py``;
times are maxima over the ranks, then medians.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import yaml
from bench_arms import AUTOEP_FUSED, Shape, autoep_engine, native
from benchmark import environment, interleaved, summary
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from lm import Attention
from torch import distributed as dist
from torch import nn

# Arm -> backend.
NATIVE = {"stock": None, "sequential": "sequential", "ours": "auto"}
AUTOEP = {"autoep_fused": None, "ours_autoep": "auto"}
SEQ_LEN = 2048


class Block(nn.Module):
    def __init__(self, shape: Shape, seq_len: int, device: torch.device, dtype: torch.dtype, backend: str | None):
        super().__init__()
        with torch.device(device):
            self.attention_norm, self.moe_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
            self.attention = Attention(shape.hidden, shape.hidden // 128 or 1, seq_len)
        self.moe = native(shape, device, dtype, backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, l_aux, _ = self.moe(self.moe_norm(x))
        return x + y, l_aux


class Model(nn.Module):
    def __init__(self, shape: Shape, layers: int, seq_len: int, device: torch.device, dtype, backend: str | None):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(shape, seq_len, device, dtype, backend) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        auxiliary = 0.0
        for block in self.blocks:
            x, l_aux = block(x)
            auxiliary = auxiliary + l_aux
        return x.float().square().mean() + 0.01 * auxiliary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True, help="YAML list of shapes")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON record a shape")
    parser.add_argument("--only", help="comma-separated names of shapes")
    parser.add_argument("--arms", default=",".join((*NATIVE, *AUTOEP)), help="comma-separated; AutoEP's need a GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=6, help="bursts of steps of each arm")
    parser.add_argument("--limit", type=int, default=150, help="seconds for one shape, after which stacks are printed")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        get_accelerator().set_device(device.index)
    limit = datetime.timedelta(seconds=arguments.limit)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False, timeout=limit)
    for entry in yaml.safe_load(arguments.shapes.read_text()):
        if arguments.only and entry["name"] not in arguments.only.split(","):
            continue
        faulthandler.dump_traceback_later(arguments.limit, exit=True)
        record = run(Shape(**entry), arguments.arms.split(","), arguments.layers, arguments.samples, device)
        if dist.get_rank() == 0:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"step-{entry['name']}.json").write_text(json.dumps(record, indent=1) + "\n")
            print(table(record), flush=True)
    faulthandler.dump_traceback_later(60, exit=True)
    dist.destroy_process_group()
    return 0


def run(shape: Shape, names: list[str], layers: int, samples: int, device: torch.device) -> dict:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seq_len = min(SEQ_LEN, shape.tokens)
    generator = torch.Generator(device).manual_seed(10 + dist.get_rank())
    size = (shape.tokens // seq_len, seq_len)
    x = torch.randn(*size, shape.hidden, device=device, dtype=dtype, generator=generator)
    ids = torch.randint(0, 512, size, device=device, generator=generator)
    engines, losses = {}, {}
    for name in names:
        if name in NATIVE:
            engines[name] = engine_of(shape, layers, seq_len, device, dtype, NATIVE[name])
        else:
            engines[name] = autoep_engine(
                shape, layers, device, dtype, AUTOEP_FUSED, AUTOEP[name], engine_config(dtype)
            )

    def loss_of(name: str) -> torch.Tensor:
        return engines[name](x) if name in NATIVE else engines[name](input_ids=ids, labels=ids).loss

    with torch.no_grad():
        losses = {name: loss_of(name).item() for name in engines}

    def step(name: str, _: int) -> None:
        engines[name].backward(loss_of(name))
        engines[name].step()

    times = interleaved(list(engines), step, samples, device)
    return {
        "shape": vars(shape),
        "layers": layers,
        "ranks": dist.get_world_size(),
        "environment": environment(device),
        "first_losses": losses,
        "step_ms": {name: summary(values) for name, values in times.items()},
    }


def engine_of(shape: Shape, layers: int, seq_len: int, device: torch.device, dtype: torch.dtype, backend: str | None):
    model = Model(shape, layers, seq_len, device, dtype, backend)
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
    for name, times in record["step_ms"].items():
        ours = "ours" if name in NATIVE else "ours_autoep"
        gain = f", {ours} {medians[name] / medians[ours]:.2f}x as fast" if ours in medians and name != ours else ""
        lines.append(
            f"  {name:12s} {times['median']:9.3f} (p10 {times['p10']:.3f}, p90 {times['p90']:.3f}), first loss "
            f"{record['first_losses'][name]:.4f}{gain}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
