"""``ds-tileoverlap trace``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..arguments import UsageError, at_least_one, block_of, shape
from ..config import BLOCK
from ..planning.routing import Shape
from ..ranks import last_words, running
from . import perfetto, report

FILE = "trace.json.gz"
LIMIT_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", type=shape, required=True, help="one layer of gated experts: H=2048,I=768,E=128,k=8,tokens=8192"
    )
    parser.add_argument(
        "--ranks", type=at_least_one, help="of the expert-parallel group; default: all GPUs, or 2 on a CPU"
    )
    parser.add_argument("--config", type=Path, help="a ds_config file with the layer's options")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FILE} and trace.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Traces a step and prints its numbers; returns 0, or 1 where there is no timeline.

    Raises:
        UsageError: nothing can be traced, or the file is there already.
    """
    num_gpus = torch.cuda.device_count()
    num_ranks = arguments.ranks or num_gpus or 2
    try:
        block = block_of(arguments.config)
        faults = _faults(arguments.shape, num_ranks, num_gpus, arguments.out)
    except OSError as error:
        raise UsageError(error) from error
    if faults:
        raise UsageError("; ".join(faults))
    job = {"shape": asdict(arguments.shape), "block": block, "folder": str(arguments.out)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with running(num_ranks, f"{__package__}.job", json.dumps(job), limit_s=LIMIT_S, **pipes) as launcher:
            out, err = launcher.communicate()
    except TimeoutError:
        print(f"ds-tileoverlap: the {num_ranks} ranks were not done in {LIMIT_S:.0f} s", file=sys.stderr)
        return 1
    said = [line for line in out.splitlines() if line.startswith(f"{BLOCK}:")]
    print("\n".join(said), file=sys.stderr)
    if launcher.returncode or not (arguments.out / FILE).exists():
        if launcher.returncode:
            print(f"ds-tileoverlap: the {num_ranks} ranks failed: {last_words(err)}", file=sys.stderr)
        return 1
    facts = perfetto.read(arguments.out / FILE)["otherData"]
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        report.show(facts)
    return 0


def _faults(layer: Shape, num_ranks: int, num_gpus: int, folder: Path) -> list[str]:
    faults = [f"{name}: got {value}, expected at least 1" for name, value in vars(layer).items() if value < 1]
    if layer.experts % num_ranks:
        faults.append(f"--ranks: got {num_ranks}, expected at least 1 and a divisor of the {layer.experts} experts")
    if num_gpus and num_ranks > num_gpus:
        faults.append(f"--ranks: got {num_ranks}, expected at most the {num_gpus} GPUs of this machine")
    if layer.top_k > layer.experts:
        faults.append(f"k: got {layer.top_k}, expected at most the {layer.experts} experts")
    if (folder / FILE).exists():
        faults.append(f"--out: {folder / FILE} exists already")
    return faults
