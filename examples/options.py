"""The example's options: presets, the command line, the ds_config file, and every check made before training."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from lm import Shape

SETTINGS_FILE = "settings.json"
MODEL_FILE = "mp_rank_00_model_states.pt"  # what DeepSpeed always writes into a checkpoint's folder


class UsageError(Exception):
    """What was asked for cannot be done; the message is all that the user sees."""


@dataclass(frozen=True)
class RunSize:
    """How much a run trains and evaluates."""

    seq_len: int
    micro_batch: int
    steps: int
    lr: float
    eval_every: int
    eval_windows: int

    def faults(self, world_size: int) -> list[str]:
        """What is wrong with the values, one line each."""
        faults = too_small(
            {option.name: getattr(self, option.name) for option in fields(RunSize) if option.name != "lr"}
        )
        if not 0 < self.lr < math.inf:
            faults.append(f"--lr: got {self.lr}, expected a number above 0")
        if self.eval_windows < world_size:
            faults.append(f"--eval-windows: got {self.eval_windows}, expected at least one a rank, {world_size}")
        return faults


@dataclass(frozen=True)
class Settings(RunSize):
    """A run of the language model; ``--preset`` picks one and options replace single values."""

    shape: Shape
    bf16: bool


PRESETS = {
    "small": Settings(128, 8, 600, 3e-3, 100, 256, Shape(128, 4, 4, 256, 8, 2, 2), bf16=False),
    "large": Settings(512, 8, 2000, 6e-4, 250, 512, Shape(512, 8, 8, 1024, 16, 2, 2), bf16=True),
}


class Parser(argparse.ArgumentParser):
    """Leaves it to the program how an error is told, since several ranks find it."""

    def error(self, message: str) -> None:
        raise UsageError(f"{message} (--help lists the options)")


def parse_arguments(description: str) -> argparse.Namespace:
    parser = Parser(description=description)
    add_run_options(parser, "runs/train_moe")
    parser.add_argument("--swap-demo", action="store_true", help="start with DeepSpeed's layers, continue with ours")
    parser.add_argument("--swap-step", type=int, help="with --swap-demo: when to change layers (default: steps / 4)")
    parser.add_argument("--preset", choices=["auto", *PRESETS], default="auto", help="auto: large on GPUs, else small")
    parser.add_argument("--ep-size", type=int, help="ranks that share the experts (default: all)")
    parser.add_argument("--aux-coefficient", type=float, default=0.01, help="weight of the load-balancing loss")
    sizes = parser.add_argument_group("replacing a value of the preset")
    for group in (Settings, Shape):
        add_sizes(sizes, group)
    return parser.parse_args()


def add_run_options(parser: argparse.ArgumentParser, save_dir: str) -> None:
    """The options that every training example has."""
    parser.add_argument("--deepspeed_config", type=Path, required=True, help="ds_config file (JSON)")
    parser.add_argument("--save-dir", type=Path, default=Path(save_dir), help="what the run writes")
    parser.add_argument("--resume", type=Path, help="continue from a run's folder (its latest checkpoint), or from one")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: none on the way)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and data")
    parser.add_argument("--verbose", action="store_true", help="show DeepSpeed's own messages")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")


def add_sizes(parser: argparse._ArgumentGroup, group: type) -> None:
    """An option for every number of a dataclass."""
    for option in fields(group):
        if option.type in ("int", "float"):
            kind = {"int": int, "float": float}[option.type]
            parser.add_argument("--" + option.name.replace("_", "-"), type=kind, default=None)


def choose_settings(args: argparse.Namespace) -> Settings:
    on_gpu = get_accelerator().device_name() != "cpu"
    settings = PRESETS[("large" if on_gpu else "small") if args.preset == "auto" else args.preset]
    given = {name: value for name, value in vars(args).items() if value is not None}
    shape = replace(settings.shape, **{f.name: given[f.name] for f in fields(Shape) if f.name in given})
    return replace(settings, shape=shape, **{f.name: given[f.name] for f in fields(Settings) if f.name in given})


def check(args: argparse.Namespace, settings: Settings, world_size: int) -> None:
    """Raises one :class:`UsageError` that lists everything wrong with the options."""
    shape, ep_size = settings.shape, args.ep_size or world_size
    faults = settings.faults(world_size) + too_small({**asdict(shape), "ep_size": ep_size})
    if not 0 <= args.aux_coefficient < math.inf:
        faults.append(f"--aux-coefficient: got {args.aux_coefficient}, expected a number of at least 0")
    if faults:
        raise UsageError("; ".join(faults))
    if world_size % ep_size:
        faults.append(f"--ep-size: got {ep_size}, expected a divisor of the number of ranks, {world_size}")
    if shape.experts % ep_size:
        faults.append(f"--experts: got {shape.experts}, expected a multiple of the expert-parallel size {ep_size}")
    if shape.d_model % (2 * shape.heads):
        faults.append(f"--d-model: got {shape.d_model}, expected a multiple of 2 x heads = {2 * shape.heads}")
    if shape.top_k > shape.experts:
        faults.append(f"--top-k: got {shape.top_k}, expected at most the number of experts, {shape.experts}")
    if shape.moe_every > shape.layers:
        faults.append(f"--moe-every: got {shape.moe_every}, expected at most the number of layers, {shape.layers}")
    if args.swap_step is not None and not (args.swap_demo and 0 < args.swap_step < settings.steps):
        faults.append(f"--swap-step: got {args.swap_step}, expected --swap-demo and 1 to {settings.steps - 1}")
    if args.swap_demo and settings.steps < 2:
        faults.append(f"--steps: got {settings.steps}, expected at least 2 with --swap-demo")
    if args.swap_demo and args.resume:
        faults.append("--swap-demo and --resume: got both, expected one (the demonstration starts from nothing)")
    if faults:
        raise UsageError("; ".join(faults))


def too_small(sizes: dict[str, int]) -> list[str]:
    return [f"--{n.replace('_', '-')}: got {value}, expected at least 1" for n, value in sizes.items() if value < 1]


def make_save_dir(path: Path) -> None:
    """The folder of ``--save-dir``, before a run's work could be lost for want of it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--save-dir: cannot make {path} ({error.strerror})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--save-dir: got {path}, expected a folder that this user may write to")


def read_config(args: argparse.Namespace, settings: Settings) -> dict:
    """The ds_config, with ``"auto"`` replaced by the preset's value where this program knows one."""
    config = read_json(args.deepspeed_config)
    tile_overlap = config.get("tile_overlap")
    if args.swap_demo and not (isinstance(tile_overlap, dict) and tile_overlap.get("enabled") is True):
        raise UsageError(f"--swap-demo: {args.deepspeed_config} has no tile_overlap block with enabled = true")
    return filled(config, settings, {("bf16", "enabled"): settings.bf16})


def read_json(path: Path) -> dict:
    """The ds_config file as it stands."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--deepspeed_config: cannot read {path} ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"--deepspeed_config: {path} is no JSON file ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed_config: {path}: expected a JSON object")
    return config


def filled(config: dict, settings: RunSize, more: dict[tuple[str, ...], Any]) -> dict:
    """``config`` with ``"auto"`` replaced by what the settings say, and by ``more``: path of keys -> value."""
    known = {("train_micro_batch_size_per_gpu",): settings.micro_batch, ("optimizer", "params", "lr"): settings.lr}
    for path, value in {**known, **more}.items():
        block = config
        for key in path[:-1]:
            block = block.get(key) if isinstance(block, dict) else None
        if isinstance(block, dict) and block.get(path[-1]) == "auto":
            block[path[-1]] = value
    return config


def find_checkpoint(resume: Path | None, identity: dict, steps: int) -> tuple[Path, int] | None:
    """Where to resume a run of this identity: (the run's folder, the step), or ``None``."""
    path = resume
    if path is None:
        return None
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text().strip()
    step, settings_file = path.name.removeprefix("step"), path.parent / SETTINGS_FILE
    if not (step.isdigit() and (path / MODEL_FILE).is_file() and settings_file.is_file()):
        raise UsageError(f"--resume: {resume} holds no checkpoint of this program")
    saved = json.loads(settings_file.read_text())
    if different := [f"{n} was {saved.get(n)}, is {now}" for n, now in identity.items() if saved.get(n) != now]:
        raise UsageError(f"--resume: {resume} was made with other settings ({'; '.join(different)})")
    if int(step) >= steps:
        raise UsageError(f"--steps: got {steps}, expected more than the checkpoint's {step}")
    return path.parent, int(step)


def comparable(args: argparse.Namespace, settings: Settings, world_size: int) -> dict:
    """The settings that a checkpoint, its optimizer state included, and the run that continues it must share."""
    ranks = {"ranks": world_size, "ep_size": args.ep_size or world_size}
    return {**asdict(settings.shape), "seq_len": settings.seq_len, "seed": args.seed, **ranks}
