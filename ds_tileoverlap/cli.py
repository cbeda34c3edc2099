"""The command ``ds-tileoverlap``, also ``python -m ds_tileoverlap``."""

from __future__ import annotations

import argparse
import signal
import sys

from . import doctor
from .arguments import UsageError
from .bench import command as bench
from .ckpt import command as ckpt
from .planning import command as planning
from .planning import tune
from .trace import command as trace

PURPOSE = "DeepSpeed MoE layers whose exchanges run inside the expert GEMMs: plan, tune, trace, check, convert, measure"
# Name -> (what it is for, a function that adds its arguments; it sets ``run``, from the arguments to the exit code).
COMMANDS = {
    "bench": ("run the benchmarks, and report what they found", bench.add_arguments),
    "ckpt": ("inspect and convert checkpoints of MoE models", ckpt.add_arguments),
    "doctor": ("what this machine can do, what it cannot, and why", doctor.add_arguments),
    "plan": ("what a layer would take on both backends, predicted without a GPU", planning.add_arguments),
    "trace": ("the timeline of one training step of a layer on this machine", trace.add_arguments),
    "tune": ("measure this machine once, for what 'auto' decides and 'plan' predicts", tune.add_arguments),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code, 0 where all is well, 1 where something was found, 2 for wrong usage."""
    parser = argparse.ArgumentParser("ds-tileoverlap", description=PURPOSE)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (purpose, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=purpose, description=purpose))
    parsed = parser.parse_args(arguments)
    # A job that is ended cleans up as one that is interrupted does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return parsed.run(parsed)
    except UsageError as error:
        print(f"ds-tileoverlap: {error}", file=sys.stderr)
        return 2
