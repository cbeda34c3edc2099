"""The example's options: presets, the command line, the ds_config file, and every check made before training."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from lm import Shape

SETTINGS_FILE = "settings.json"
MODEL_FILE = "mp_rank_00_model_states.pt"  # what DeepSpeed always writes into a checkpoint's folder


class UsageError(Exception):
    """What was asked for cannot be done; the message is all that the user sees."""


@dataclass(frozen=True)
class Settings:
    """A run's size; ``--preset`` picks one and options replace single values."""

    shape: Shape
    seq_len: int
    micro_batch: int
    steps: int
    lr: float
    bf16: bool
    eval_every: int
    eval_windows: int


PRESETS = {
    "small": Settings(Shape(128, 4, 4, 256, 8, 2, 2), 128, 8, 600, 3e-3, False, 100, 256),
    "large": Settings(Shape(512, 8, 8, 1024, 16, 2, 2), 512, 8, 2000, 6e-4, True, 250, 512),
}


class Parser(argparse.ArgumentParser):
    """Leaves it to the program how an error is told, since several ranks find it."""

    def error(self, message: str) -> None:
        raise UsageError(f"{message} (--help lists the options)")


def parse_arguments(description: str) -> argparse.Namespace:
    parser = Parser(description=description)
    parser.add_argument("--deepspeed_config", type=Path, required=True, help="ds_config file (JSON)")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/train_moe"), help="checkpoints and loss curve")
    parser.add_argument("--resume", type=Path, help="continue from a run's folder (its latest checkpoint), or from one")
    parser.add_argument("--swap-demo", action="store_true", help="start with DeepSpeed's layers, continue with ours")
    parser.add_argument("--swap-step", type=int, help="with --swap-demo: when to change layers (default: steps / 4)")
    parser.add_argument("--preset", choices=["auto", *PRESETS], default="auto", help="auto: large on GPUs, else small")
    parser.add_argument("--ep-size", type=int, help="ranks that share the experts (default: all)")
    parser.add_argument("--aux-coefficient", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: only at the end)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and data")
    parser.add_argument("--verbose", action="store_true", help="show DeepSpeed's own messages")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    sizes = parser.add_argument_group("replacing a value of the preset")
    for group in (Settings, Shape):
        for option in fields(group):
            if option.type in ("int", "float"):
                kind = {"int": int, "float": float}[option.type]
                sizes.add_argument("--" + option.name.replace("_", "-"), type=kind, default=None)
    return parser.parse_args()


def choose_settings(args: argparse.Namespace) -> Settings:
    on_gpu = get_accelerator().device_name() != "cpu"
    settings = PRESETS[("large" if on_gpu else "small") if args.preset == "auto" else args.preset]
    given = {name: value for name, value in vars(args).items() if value is not None}
    shape = replace(settings.shape, **{f.name: given[f.name] for f in fields(Shape) if f.name in given})
    return replace(settings, shape=shape, **{f.name: given[f.name] for f in fields(Settings) if f.name in given})


def check(args: argparse.Namespace, settings: Settings, world_size: int) -> None:
    """Raises one :class:`UsageError` that lists everything wrong with the options."""
    shape, faults = settings.shape, []
    ep_size = args.ep_size or world_size
    sizes = {**asdict(settings), **asdict(shape), "ep_size": ep_size}
    for name in ("seq_len", "micro_batch", "steps", "eval_every", "eval_windows", *asdict(shape), "ep_size"):
        if sizes[name] < 1:
            faults.append(f"--{name.replace('_', '-')}: got {sizes[name]}, expected at least 1")
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
    if settings.eval_windows < world_size:
        faults.append(f"--eval-windows: got {settings.eval_windows}, expected at least one a rank, {world_size}")
    if args.swap_step is not None and not (args.swap_demo and 0 < args.swap_step < settings.steps):
        faults.append(f"--swap-step: got {args.swap_step}, expected --swap-demo and 1 to {settings.steps - 1}")
    if args.swap_demo and settings.steps < 2:
        faults.append(f"--steps: got {settings.steps}, expected at least 2 with --swap-demo")
    if args.swap_demo and args.resume:
        faults.append("--swap-demo and --resume: got both, expected one (the demonstration starts from nothing)")
    if faults:
        raise UsageError("; ".join(faults))


def read_config(args: argparse.Namespace, settings: Settings) -> dict:
    """The ds_config, with ``"auto"`` replaced by the preset's value where this program knows one."""
    try:
        config = json.loads(args.deepspeed_config.read_text())
    except OSError as error:
        raise UsageError(f"--deepspeed_config: cannot read {args.deepspeed_config} ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"--deepspeed_config: {args.deepspeed_config} is no JSON file ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed_config: {args.deepspeed_config}: expected a JSON object")
    tile_overlap = config.get("tile_overlap")
    if args.swap_demo and not (isinstance(tile_overlap, dict) and tile_overlap.get("enabled") is True):
        raise UsageError(f"--swap-demo: {args.deepspeed_config} has no tile_overlap block with enabled = true")
    for path, value in {
        ("train_micro_batch_size_per_gpu",): settings.micro_batch,
        ("optimizer", "params", "lr"): settings.lr,
        ("bf16", "enabled"): settings.bf16,
    }.items():
        block = config
        for key in path[:-1]:
            block = block.get(key) if isinstance(block, dict) else None
        if isinstance(block, dict) and block.get(path[-1]) == "auto":
            block[path[-1]] = value
    return config


def find_checkpoint(args: argparse.Namespace, settings: Settings, world_size: int) -> tuple[Path, int] | None:
    """Where to resume: (the run's folder, the step), or ``None``."""
    path = args.resume
    if path is None:
        return None
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text().strip()
    step, settings_file = path.name.removeprefix("step"), path.parent / SETTINGS_FILE
    if not (step.isdigit() and (path / MODEL_FILE).is_file() and settings_file.is_file()):
        raise UsageError(f"--resume: {args.resume} holds no checkpoint of this program")
    saved = json.loads(settings_file.read_text())
    now = comparable(args, settings, world_size)
    if different := [f"{name} was {saved.get(name)}, is {now[name]}" for name in now if saved.get(name) != now[name]]:
        raise UsageError(f"--resume: {args.resume} was made with other settings ({'; '.join(different)})")
    if int(step) >= settings.steps:
        raise UsageError(f"--steps: got {settings.steps}, expected more than the checkpoint's {step}")
    return path.parent, int(step)


def comparable(args: argparse.Namespace, settings: Settings, world_size: int) -> dict:
    """The settings that a checkpoint, its optimizer state included, and the run that continues it must share."""
    ranks = {"ranks": world_size, "ep_size": args.ep_size or world_size}
    return {**asdict(settings.shape), "seq_len": settings.seq_len, "seed": args.seed, **ranks}
