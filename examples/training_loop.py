"""What the training examples share: a run's state, its steps, evaluations and checkpoints, and how a program ends."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import deepspeed
import torch
from corpus import Corpus
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from options import SETTINGS_FILE, RunSize, UsageError
from tqdm import tqdm

import ds_tileoverlap


@dataclass
class Run:
    """What stays while models and engines come and go.

    Attributes:
        identity: what a checkpoint and the run that continues it must share.
        losses: (engine, batch) -> (cross-entropy, what is minimised), of tokens int64 [micro_batch, seq_len + 1].
        first_step: where the progress bar starts.
        seconds, tokens: spent and seen in training steps by all ranks together, with the engine at hand.
        history: what a checkpoint keeps for the loss curve: {"train" and "eval": [[step, loss], ...], "swap": step}.
    """

    args: argparse.Namespace
    settings: RunSize
    identity: dict
    corpus: Corpus
    losses: Callable[[deepspeed.DeepSpeedEngine, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    first_step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    history: dict = field(default_factory=lambda: {"train": [], "eval": [], "swap": None})

    def __post_init__(self):
        longest = min(len(self.corpus.train), len(self.corpus.held_out)) - 1
        if self.settings.seq_len > longest:
            raise UsageError(
                f"--seq-len: got {self.settings.seq_len}, expected at most {longest}, the held-out text's length"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.bar = tqdm(
            total=self.settings.steps, initial=self.first_step, unit="step", mininterval=1.0, disable=self.rank != 0
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def say(self, message: str) -> None:
        if self.rank == 0:
            self.bar.write(message)


def warmup_then_cosine(steps: int) -> Callable:
    """A learning rate that rises over a twentieth of the run, then falls to a tenth; for ``deepspeed.initialize``."""

    def factor(step: int) -> float:
        warmup = max(1, steps // 20)
        progress = min(1.0, step / steps)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def backend_of(engine: deepspeed.DeepSpeedEngine) -> str:
    """What really runs the MoE layers: "stock", or the name of the backend of ours."""
    runtimes = (getattr(module, "tile_overlap", None) for module in engine.module.modules())
    return next((runtime.backend for runtime in runtimes if runtime is not None), "stock")


def mean_over_ranks(value: torch.Tensor, run: Run) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / run.world_size


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, run: Run) -> float:
    """Loss on the held-out text, nats per token; every rank takes an equal share of the windows."""
    settings = run.settings
    count = settings.eval_windows // run.world_size * run.world_size
    windows = run.corpus.evaluation(count, settings.seq_len)[run.rank :: run.world_size]
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for batch in windows.split(settings.micro_batch):
        total += run.losses(engine, batch.to(engine.device))[0] * len(batch)
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
        loss, objective = run.losses(engine, batch.to(engine.device))
        engine.backward(objective)
        engine.step()
        total += loss.detach() / micro_steps
    run.tokens += micro_steps * micro_batch * settings.seq_len * run.world_size
    return total


def train(engine: deepspeed.DeepSpeedEngine, run: Run, until: int) -> float:
    """Trains up to step ``until`` and evaluates there; returns that evaluation's loss."""
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
        if run.args.save_every and step % run.args.save_every == 0 and step < until:
            save(engine, run)
    return eval_loss


def save(engine: deepspeed.DeepSpeedEngine, run: Run) -> None:
    """Writes model, optimizer, schedule, step (which is the data's position too) and the curve so far."""
    engine.save_checkpoint(run.args.save_dir, tag=f"step{engine.global_steps}", client_state={"history": run.history})
    if run.rank == 0:
        (run.args.save_dir / SETTINGS_FILE).write_text(json.dumps(run.identity, indent=2) + "\n")


def load(engine: deepspeed.DeepSpeedEngine, run: Run, folder: os.PathLike, step: int) -> None:
    """Restores everything that :func:`save` wrote."""
    _, client_state = engine.load_checkpoint(folder, tag=f"step{step}")
    run.history = client_state["history"]


def world_size() -> int:
    """The number of ranks that the launcher started."""
    if "RANK" not in os.environ:
        raise UsageError(f"start it with the deepspeed launcher: deepspeed --num_gpus 2 {sys.argv[0]} ...")
    return int(os.environ["WORLD_SIZE"])


def start_ranks(verbose: bool) -> None:
    """The process group, and quiet libraries on top of it."""
    if not verbose:
        logger.setLevel("WARNING")
        # DeepSpeed calls names of torch.distributed that newer versions of torch warn about at each call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed(verbose=verbose)
    if get_accelerator().device_name() == "cpu":
        # Each rank would otherwise start as many threads as the machine has cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_SIZE"])))


def run_main(main: Callable[[], None], name: str) -> int:
    """Runs a program's ``main``; returns the exit code. A fault that every rank finds alike is told once, by rank 0."""
    fault = None
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        main()
    except (UsageError, ds_tileoverlap.ConfigError) as error:
        fault = error
        if is_first:
            tqdm.write(f"{name}: {fault}", file=sys.stderr)
    # Not after other exceptions: those may have struck one rank alone, and the groups could then wait for the others.
    if dist.is_initialized():
        dist.destroy_process_group()
    if fault and not is_first:
        time.sleep(30)  # the launcher ends all ranks when one has failed, and rank 0 has to speak first
    return 2 if fault else 0
