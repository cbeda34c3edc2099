"""The options of each benchmark: the same for the command, for its ranks, and for what a record says of itself."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from ..arguments import UsageError, at_least_one
from .measure import BURST
from .shapes import LayerShape, Sizes, StageShape, read_shapes

LAYER, STAGES, STEP = "layer", "stages", "step"
PURPOSES = {
    LAYER: "time one MoE layer, forward and forward + backward, against what DeepSpeed users have today",
    STAGES: "time each stage in which a GEMM and an exchange are one kernel against its parts; needs Hopper GPUs",
    STEP: "time training steps of a transformer with MoE layers under DeepSpeed's engine",
}
SHAPES: dict[str, type[Sizes]] = {LAYER: LayerShape, STAGES: StageShape, STEP: LayerShape}
# What --arms may name, and runs by itself; of the layer also ``chunks_N``, where asked for.
ARMS = {
    LAYER: ("stock", "autoep", "autoep_fused", "sequential", "ours_autoep", "ours"),
    STEP: ("stock", "sequential", "ours", "autoep_fused", "ours_autoep"),
}
OF_ARMS = {
    LAYER: "ours is always run; ours_autoep is AutoEP's layer converted; chunks_N is the sequential backend on N "
    "pieces of the tokens, exchanges of one under the GEMMs of another",
    STEP: "ours_autoep is AutoEP's model converted",
}
CHUNKS = re.compile(r"chunks_([1-9]\d*)")
# Until the first shape, seconds: imports, the process group, and DeepSpeed's and our operators, built at first use.
START_LIMIT_S = 300
SAMPLES = {LAYER: 12, STAGES: 6, STEP: 6}
LIMITS = {LAYER: 280, STAGES: 280, STEP: 150}


def add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """What a benchmark is told, whoever starts its ranks."""
    keys = ", ".join(SHAPES[kind].__dataclass_fields__)
    parser.add_argument("--shapes", type=Path, required=True, help=f"YAML list of shapes, each with the keys {keys}")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON record a shape")
    parser.add_argument("--only", type=_words, default=(), help="comma-separated names of shapes; default: all")
    bursts = f"bursts of {BURST} iterations of each arm; default: {SAMPLES[kind]}"
    parser.add_argument("--samples", "--iters", type=at_least_one, default=SAMPLES[kind], help=bursts)
    limit = f"seconds for one shape, after which stacks are printed and all ends; default: {LIMITS[kind]}"
    parser.add_argument("--limit", type=at_least_one, default=LIMITS[kind], help=limit)
    if kind in ARMS:
        arms = f"comma-separated; default: {','.join(ARMS[kind])}; {OF_ARMS[kind]}"
        parser.add_argument("--arms", type=_words, default=ARMS[kind], help=arms)
    if kind == LAYER:
        parser.add_argument("--breakdown", action="store_true", help="also write a table of the kernels of ours")
    if kind == STAGES:
        sms = "comma-separated numbers of SMs for couriers of the return; default: 0,8"
        parser.add_argument("--comm-sms", type=_numbers, default=(0, 8), help=sms)
        launch = "launch kernels one by one instead of replaying CUDA graphs"
        parser.add_argument("--launch", action="store_true", help=launch)
    if kind == STEP:
        parser.add_argument("--layers", type=at_least_one, default=4, help="of the transformer; default: 4")


def check(kind: str, options: argparse.Namespace, ranks: int) -> list[Sizes]:
    """The shapes that are to be measured on so many ranks.

    Raises:
        UsageError: an option or the file of shapes is wrong, or a record is there already.
    """
    unknown = [arm for arm in getattr(options, "arms", ()) if arm not in ARMS[kind] and not _is_chunks(kind, arm)]
    if unknown:
        also = " or chunks_N" if kind == LAYER else ""
        raise UsageError(f"--arms: got {', '.join(unknown)}, expected of {', '.join(ARMS[kind])}{also}")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out: got {options.out}, a file, expected a folder")
    shapes = read_shapes(options.shapes, SHAPES[kind], ranks, options.only)
    paths = [record_path(kind, options.out, shape) for shape in shapes]
    if there := [str(path) for path in paths if path.exists()]:
        raise UsageError(f"--out: {', '.join(there)} exists already (--only measures other shapes)")
    return shapes


def _is_chunks(kind: str, arm: str) -> bool:
    return kind == LAYER and CHUNKS.fullmatch(arm) is not None


def words(kind: str, options: argparse.Namespace) -> list[str]:
    """The options as on a command line; those that have their default are left out."""
    parser = argparse.ArgumentParser()
    add_options(parser, kind)
    found = []
    for name, default in vars(parser.parse_args(["--shapes", "", "--out", ""])).items():
        value = getattr(options, name)
        if value != default:
            found.append("--" + name.replace("_", "-"))
            found += [] if value is True else [",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return found


def command_line(kind: str, options: argparse.Namespace, ranks: int) -> str:
    """How the same benchmark is started again; its ``--out`` is left to whoever does."""
    given = words(kind, argparse.Namespace(**{**vars(options), "out": Path()}))
    return shlex.join(["ds-tileoverlap", "bench", "run", kind, *given, "--ranks", str(ranks)])


def record_path(kind: str, out: Path, shape: Sizes) -> Path:
    return out / f"{'' if kind == LAYER else kind + '-'}{shape.name}.json"


def _words(text: str) -> tuple[str, ...]:
    if not all(found := text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected names with commas between them")
    return tuple(found)


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers with commas between them")
    return tuple(map(int, text.split(",")))
