"""Trains a byte-level MoE language model on the Python standard library's sources, with expert parallelism.

    deepspeed --num_gpus 2 examples/train_moe.py --deepspeed_config configs/train_moe.json --swap-demo

The model is written for DeepSpeed's own MoE layer; the ``"tile_overlap"`` block of the ds_config alone decides what
runs it. With ``--swap-demo`` the first steps run with that block off, then their checkpoint is continued with it on.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass, field

import deepspeed
import torch
from corpus import standard_library
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import logger
from lm import LanguageModel, count_parameters, moe_layers
from loss_curve import draw
from options import (
    SETTINGS_FILE,
    Settings,
    UsageError,
    check,
    choose_settings,
    comparable,
    find_checkpoint,
    parse_arguments,
    read_config,
)
from tqdm import tqdm

import ds_tileoverlap

# Largest difference of the evaluation losses around the swap, nats per byte: the same arithmetic in another order.
SWAP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 2e-3}


@dataclass
class Run:
    """What stays while models and engines come and go.

    Attributes:
        first_step: where the progress bar starts.
        seconds, tokens: spent and seen in training steps by all ranks together, with the engine at hand.
        history: what a checkpoint keeps for the loss curve: {"train" and "eval": [[step, loss], ...], "swap": step}.
    """

    args: argparse.Namespace
    settings: Settings
    rank: int
    world_size: int
    ep_size: int
    first_step: int
    seconds: float = 0.0
    tokens: int = 0
    history: dict = field(default_factory=lambda: {"train": [], "eval": [], "swap": None})

    def __post_init__(self):
        self.corpus = standard_library()
        self.bar = tqdm(
            total=self.settings.steps, initial=self.first_step, unit="step", mininterval=1.0, disable=self.rank != 0
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def say(self, message: str) -> None:
        if self.rank == 0:
            self.bar.write(message)


def start(run: Run, ds_config: dict) -> deepspeed.DeepSpeedEngine:
    """A fresh model in a fresh engine; DeepSpeed initialises a model only once."""
    settings = run.settings
    # DeepSpeed's expert-parallel groups are runs of consecutive ranks.
    ep_rank = run.rank % run.ep_size
    model = LanguageModel(settings.shape, settings.seq_len, run.ep_size, ep_rank, run.args.seed)
    parameters = {"params": list(model.parameters()), "name": "all"}

    def factor(step: int) -> float:
        """Linear warm-up over a twentieth of the run, then a cosine down to a tenth."""
        warmup = max(1, settings.steps // 20)
        progress = min(1.0, step / settings.steps)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))

    engine, *_ = ds_tileoverlap.initialize(
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
        config=ds_config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    )
    run.seconds, run.tokens = 0.0, 0
    run.say(f"engine: {len(moe_layers(model))} MoE layers on {backend_of(engine)}, ep_size {run.ep_size}")
    return engine


def backend_of(engine: deepspeed.DeepSpeedEngine) -> str:
    """What really runs the MoE layers: "stock", or the name of the backend of ours."""
    runtime = getattr(moe_layers(engine.module)[0].deepspeed_moe, "tile_overlap", None)
    return "stock" if runtime is None else runtime.backend


def mean_over_ranks(value: torch.Tensor, run: Run) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / run.world_size


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, run: Run) -> float:
    """Loss on the held-out files, nats per byte; every rank takes an equal share of the windows."""
    settings = run.settings
    count = settings.eval_windows // run.world_size * run.world_size
    windows = run.corpus.evaluation(count, settings.seq_len)[run.rank :: run.world_size]
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for batch in windows.split(settings.micro_batch):
        total += engine(batch.to(engine.device))[0] * len(batch)
    engine.train()
    loss = mean_over_ranks(total / len(windows), run)
    run.history["eval"].append([engine.global_steps, loss])
    speed = f" tokens_per_s={run.tokens_per_s:.0f}" if run.tokens else ""
    run.say(f"step {engine.global_steps}: eval_loss={loss:.4f}{speed} backend={backend_of(engine)}")
    return loss


def train_step(engine: deepspeed.DeepSpeedEngine, run: Run) -> torch.Tensor:
    """One optimizer step; returns this rank's cross-entropy, averaged over the micro-steps."""
    settings, step = run.settings, engine.global_steps
    micro_batch, micro_steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    total = torch.zeros((), device=engine.device)
    for micro_step in range(micro_steps):
        batch = run.corpus.batch(
            step, micro_step, run.rank, run.world_size, micro_batch, settings.seq_len, run.args.seed
        )
        loss, auxiliary = engine(batch.to(engine.device))
        engine.backward(loss + run.args.aux_coefficient * auxiliary)
        engine.step()
        total += loss.detach() / micro_steps
    run.tokens += micro_steps * micro_batch * settings.seq_len * run.world_size
    return total


def train(engine: deepspeed.DeepSpeedEngine, run: Run, until: int) -> float:
    """Trains up to step ``until``, evaluates and saves there; returns that evaluation's loss."""
    eval_loss = None
    while engine.global_steps < until:
        began = time.perf_counter()
        loss, step = train_step(engine, run), engine.global_steps
        if step % 10 == 0 or step == until:
            run.history["train"].append([step, mean_over_ranks(loss, run)])
            run.bar.set_postfix(
                loss=f"{run.history['train'][-1][1]:.3f}", tokens_per_s=f"{run.tokens_per_s:.0f}", refresh=False
            )
        # Without the time of evaluations and checkpoints. On a GPU a step's time shows where its loss is read.
        run.seconds += time.perf_counter() - began
        run.bar.update()
        if step % run.settings.eval_every == 0 or step == until:
            eval_loss = evaluate(engine, run)
        if step == until or (run.args.save_every and step % run.args.save_every == 0):
            save(engine, run)
    return eval_loss


def save(engine: deepspeed.DeepSpeedEngine, run: Run) -> None:
    """Writes model, optimizer, schedule, step (which is the data's position too) and the curve so far."""
    engine.save_checkpoint(run.args.save_dir, tag=f"step{engine.global_steps}", client_state={"history": run.history})
    if run.rank == 0:
        settings = comparable(run.args, run.settings, run.world_size)
        (run.args.save_dir / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def load(engine: deepspeed.DeepSpeedEngine, run: Run, folder: os.PathLike, step: int) -> None:
    """Restores everything that :func:`save` wrote."""
    _, client_state = engine.load_checkpoint(folder, tag=f"step{step}")
    run.history = client_state["history"]


def swap(run: Run, ds_config: dict) -> deepspeed.DeepSpeedEngine:
    """Trains with DeepSpeed's layers, then loads that checkpoint into ours, which must evaluate to the same loss."""
    swap_step = run.args.swap_step or max(1, run.settings.steps // 4)
    engine = start(run, {**ds_config, "tile_overlap": {**ds_config["tile_overlap"], "enabled": False}})
    before = train(engine, run, swap_step)
    tolerance = SWAP_TOLERANCE[next(engine.module.parameters()).dtype]
    engine.destroy()
    del engine
    gc.collect()
    get_accelerator().empty_cache()

    engine = start(run, ds_config)
    load(engine, run, run.args.save_dir, swap_step)
    after = evaluate(engine, run)
    run.history["swap"] = swap_step
    difference = abs(after - before)
    verdict = f"<= {tolerance:g}: ok" if difference <= tolerance else f"> {tolerance:g}: NOT EQUAL"
    run.say(f"swap: stock eval_loss={before:.6f} ours eval_loss={after:.6f} |difference|={difference:.1e} ({verdict})")
    if not difference <= tolerance:  # also where a loss is not a number
        raise UsageError("swap: the checkpoint does not give the same loss after the swap")
    return engine


def main() -> None:
    args = parse_arguments(__doc__.splitlines()[0])
    if "RANK" not in os.environ:
        raise UsageError("start it with the deepspeed launcher: deepspeed --num_gpus 2 examples/train_moe.py ...")
    world_size = int(os.environ["WORLD_SIZE"])
    settings = choose_settings(args)
    check(args, settings, world_size)
    ds_config = read_config(args, settings)
    checkpoint = find_checkpoint(args, settings, world_size)

    if not args.verbose:
        logger.setLevel("WARNING")
        # DeepSpeed calls names of torch.distributed that newer versions of torch warn about at each call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed(verbose=args.verbose)
    if get_accelerator().device_name() == "cpu":
        # Each rank would otherwise start as many threads as the machine has cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_SIZE"])))
    first_step = checkpoint[1] if checkpoint else 0
    run = Run(args, settings, dist.get_rank(), world_size, args.ep_size or world_size, first_step)
    longest = min(len(run.corpus.train), len(run.corpus.held_out)) - 1
    if settings.seq_len > longest:
        raise UsageError(f"--seq-len: got {settings.seq_len}, expected at most {longest}, the text's length")
    args.save_dir.mkdir(parents=True, exist_ok=True)

    engine = swap(run, ds_config) if args.swap_demo else start(run, ds_config)
    if checkpoint:
        load(engine, run, *checkpoint)
        run.say(f"resumed: {args.resume} at step {first_step}")
    eval_loss = train(engine, run, settings.steps)
    if run.rank == 0:
        draw(run.history, args.save_dir / "loss_curve.png")
    run.bar.close()
    run.say(
        f"final: step={engine.global_steps} train_loss={run.history['train'][-1][1]:.4f} eval_loss={eval_loss:.4f} "
        f"tokens_per_s={run.tokens_per_s:.0f} params={count_parameters(engine.module, run.ep_size)} "
        f"backend={backend_of(engine)}"
    )


def run_main() -> int:
    """Runs :func:`main`; returns the exit code. A fault that every rank finds alike is told once, by rank 0."""
    fault = None
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        main()
    except (UsageError, ds_tileoverlap.ConfigError) as error:
        fault = error
        if is_first:
            tqdm.write(f"train_moe: {fault}", file=sys.stderr)
    # Not after other exceptions: those may have struck one rank alone, and the groups could then wait for the others.
    if dist.is_initialized():
        dist.destroy_process_group()
    if fault and not is_first:
        time.sleep(30)  # the launcher ends all ranks when one has failed, and rank 0 has to speak first
    return 2 if fault else 0


if __name__ == "__main__":
    sys.exit(run_main())
