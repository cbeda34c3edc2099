"""One rank of a benchmark: each shape's record, written and shown by rank 0.

python -m torch.distributed.run --nproc_per_node=2 -m ds_tileoverlap.bench.worker layer --shapes FILE --out DIR
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
from importlib import import_module

import deepspeed
import torch
from torch import distributed as dist

from ..arguments import UsageError
from .measure import environment
from .options import PURPOSES, START_LIMIT_S, add_options, check, command_line, record_path

# Of the end of the group, seconds.
END_LIMIT_S = 60


def main(arguments: list[str]) -> int:
    """Runs a benchmark, ``arguments`` being its name and options; returns 0, 1 for a red gate, 2 for wrong usage."""
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="BENCHMARK")
    for kind, purpose in PURPOSES.items():
        add_options(kinds.add_parser(kind, help=purpose, description=purpose), kind)
    options = parser.parse_args(arguments)
    try:
        if "LOCAL_RANK" not in os.environ:
            raise UsageError(f"start the ranks with torchrun, or use: ds-tileoverlap bench run {options.kind}")
        return _run(options)
    except UsageError as error:
        print(f"ds-tileoverlap: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    shapes = check(options.kind, options, int(os.environ["WORLD_SIZE"]))
    benchmark = import_module(f".{options.kind}", __package__)
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True)
    device = _start(options.limit)
    passed = True
    for shape in shapes:
        faulthandler.dump_traceback_later(options.limit, exit=True)
        record = {
            "shape": vars(shape),
            "ranks": dist.get_world_size(),
            "smoke_test": device.type != "cuda",
            "environment": environment(device, command_line(options.kind, options, dist.get_world_size())),
            **benchmark.run(shape, options, device),
        }
        passed &= record["gate"]["passed"]
        if dist.get_rank() == 0:
            record_path(options.kind, options.out, shape).write_text(json.dumps(record, indent=1) + "\n")
            print(benchmark.table(record), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    faulthandler.dump_traceback_later(END_LIMIT_S, exit=True)
    dist.destroy_process_group()
    return 0 if passed else 1


def _start(limit: int) -> torch.device:
    """The process group, and this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=limit)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False, timeout=timeout)
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
