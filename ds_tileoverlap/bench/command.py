"""``ds-tileoverlap bench run`` and ``ds-tileoverlap bench report``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from ..arguments import UsageError, at_least_one
from ..ranks import running
from .options import PURPOSES, STAGES, START_LIMIT_S, add_options, check, record_path, words
from .records import RecordError, read
from .report import BEGIN, END, figures, results, with_results
from .shapes import Sizes

WORKER = f"{__package__}.worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    runs = actions.add_parser("run", help="measure; starts the ranks itself")
    kinds = runs.add_subparsers(required=True, metavar="BENCHMARK")
    for kind, purpose in PURPOSES.items():
        each = kinds.add_parser(kind, help=purpose, description=purpose)
        add_options(each, kind)
        each.add_argument("--ranks", type=at_least_one, help="default: a rank for each GPU, or two on the CPU")
        each.add_argument("--json", action="store_true", help="print one JSON object; what ranks say goes to stderr")
        each.set_defaults(run=_run, kind=kind)

    report = actions.add_parser("report", help="what the records of the benchmarks say")
    report.add_argument("records", type=Path, help="a folder of records, such as examples/results")
    report.add_argument("--readme", type=Path, help=f"rewrite the part of this file between {BEGIN} and {END}")
    report.add_argument("--html", type=Path, help="write a page with all percentiles and with plots; needs matplotlib")
    report.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    report.set_defaults(run=_report)


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where a gate is red or a rank failed."""
    kind, out = arguments.kind, arguments.out
    ranks = _ranks(arguments)
    try:
        shapes = check(kind, arguments, ranks)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(error) from error
    limit_s = START_LIMIT_S + arguments.limit * len(shapes)
    passed = _passed([kind, *words(kind, arguments)], ranks, limit_s, to_stderr=arguments.json)
    if arguments.json:
        paths = [record_path(kind, out, shape) for shape in shapes]
        print(json.dumps(_summary(kind, ranks, passed, shapes, [path for path in paths if path.exists()]), indent=2))
    return 0 if passed else 1


def _ranks(arguments: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or gpus or 2
    if gpus and ranks > gpus:
        raise UsageError(f"--ranks: got {ranks}, expected at most the number of GPUs, {gpus}")
    if not gpus and arguments.kind == STAGES:
        raise UsageError("bench run stages: got no GPU, expected Hopper GPUs, one a rank")
    return ranks


def _passed(options: list[str], ranks: int, limit_s: float, to_stderr: bool) -> bool:
    """Whether all ranks of ``worker.py`` ended well; they print where this process does, or all to stderr."""
    try:
        with running(ranks, WORKER, *options, limit_s=limit_s, stdout=2 if to_stderr else None) as launcher:
            return launcher.wait() == 0
    except TimeoutError as error:
        print(f"ds-tileoverlap: {error}", file=sys.stderr)
        return False


def _summary(kind: str, ranks: int, passed: bool, shapes: list[Sizes], written: list[Path]) -> dict:
    """What this run found; a shape without a record was not finished."""
    records = {path.stem: json.loads(path.read_text()) for path in written}
    return {
        "benchmark": kind,
        "ranks": ranks,
        "passed": passed,
        "shapes": [shape.name for shape in shapes],
        "records": records,
    }


def _report(arguments: argparse.Namespace) -> int:
    """Prints the report and writes what was asked for; returns 0.

    Raises:
        UsageError: the records or a file do not fit, or the page is there already.
    """
    if arguments.html and arguments.html.exists():
        raise UsageError(f"--html: {arguments.html} exists already")
    try:
        benchmarks = read(arguments.records)
        if arguments.html:
            from .page import page

            arguments.html.write_text(page(benchmarks), encoding="utf-8")
        if arguments.readme:
            readme = with_results(arguments.readme.read_text(encoding="utf-8"), results(benchmarks))
            arguments.readme.write_text(readme, encoding="utf-8")
    except ImportError as error:
        raise UsageError(f"--html: {error}: python -m pip install matplotlib markdown-it-py") from error
    except (RecordError, OSError) as error:
        raise UsageError(error) from error
    print(json.dumps(figures(benchmarks), indent=2) if arguments.json else results(benchmarks))
    return 0
