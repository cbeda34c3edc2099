"""``ds-tileoverlap ckpt inspect`` and ``ds-tileoverlap ckpt convert``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

from ..arguments import at_least_one
from .checkpoint import DEEPSPEED, HF, open_checkpoint
from .conversion import CheckpointError, convert
from .inspection import report, show
from .names import FAMILIES

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SAID_AFTER = {
    HF: "Optimizer state is not carried over: a Hugging Face folder holds weights alone.",
    DEEPSPEED: (
        "The model part has one file for each expert of the whole model: it loads at every ep_size that divides their "
        "number.\nOptimizer state is not carried over: the source has none, and DeepSpeed's is cut to one ep_size and "
        "number of ranks.\nLoad with engine.load_checkpoint(..., load_module_only=True)."
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="show what a checkpoint holds, and whether it is sound")
    inspect.add_argument("path", type=Path, help="a DeepSpeed MoE checkpoint, or a Hugging Face folder")
    inspect.add_argument("--tag", help="of a DeepSpeed checkpoint; default: the one that 'latest' names")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)

    to = actions.add_parser("convert", help="write the weights as a checkpoint of the other kind")
    to.add_argument("source", type=Path)
    to.add_argument("target", type=Path, help="a new folder")
    to.add_argument("--to", choices=(HF, DEEPSPEED), required=True, help="the kind of the target")
    to.add_argument("--config", type=Path, help="--to hf: folder of config.json and tokenizer files")
    to.add_argument("--family", choices=sorted(FAMILIES), help="default: model_type of config.json")
    to.add_argument("--map", type=Path, help="file of the model's own names; see configs/checkpoint_names.yaml")
    to.add_argument("--tag", help="of the DeepSpeed side; default: the latest of a source, global_step0 of a target")
    to.add_argument("--dtype", choices=_DTYPES, help="default: as in the source")
    to.add_argument("--max-shard-size", type=_bytes, default="5GB", help="--to hf: of a file; default: 5GB")
    to.add_argument(
        "--ep-size", type=at_least_one, default=1, help="--to deepspeed: check that the experts divide by it"
    )
    to.set_defaults(run=_convert)


def _inspect(arguments: argparse.Namespace) -> int:
    found = report(open_checkpoint(arguments.path, arguments.tag))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 1 if found["faults"] else 0


def _convert(arguments: argparse.Namespace) -> int:
    try:
        convert(
            arguments.source,
            arguments.target,
            arguments.to,
            config=arguments.config,
            family=arguments.family,
            name_map=arguments.map,
            tag=arguments.tag,
            dtype=_DTYPES.get(arguments.dtype),
            max_shard_bytes=arguments.max_shard_size,
            ep_size=arguments.ep_size,
        )
    except (CheckpointError, OSError) as error:
        print(f"ds-tileoverlap: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.target}: written.\n{_SAID_AFTER[arguments.to]}")
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?B|)", text.strip().upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a size like 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]
