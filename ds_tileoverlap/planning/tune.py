"""``ds-tileoverlap tune``: measures this machine's GPUs and link once, and keeps the rates for ``auto`` and ``plan``.

One rank a GPU times the stages of a few layers (``tune_worker.py``), ``fit`` finds the rates in all of them but one,
and that one says how far predictions are off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..arguments import UsageError, at_least_one
from ..ranks import last_words, running
from . import fit, machine
from .profile import Profile, write

# Layers of all kinds: bound by the host, by the link, by the GEMM; with rows and with sums that return.
LAYERS = (
    {"name": "trans-xl", "hidden": 512, "intermediate": 2048, "experts": 32, "top_k": 2, "tokens": 8192},
    {"name": "olmoe", "hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 8, "tokens": 8192},
    {"name": "qwen3-30b", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "tokens": 8192},
    {"name": "paper-like", "hidden": 4096, "intermediate": 2048, "experts": 32, "top_k": 2, "tokens": 8192},
    {"name": "mixtral", "hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2, "tokens": 8192},
    {"name": "dsv3-like", "hidden": 7168, "intermediate": 2048, "experts": 64, "top_k": 8, "tokens": 8192},
)
LEFT_OUT = "olmoe"
# Fewer layers do not tell the rates apart.
LEAST_LAYERS = 4
# Beside the measurement: the operator may have to be built, ranks start, the last layer ends.
START_S, END_S = 300.0, 60.0


class TuneError(RuntimeError):
    """Nothing could be measured; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="where to write the profile; default: a file in the user's cache")
    parser.add_argument(
        "--ranks", type=at_least_one, help="GPUs of an expert-parallel group; default: all of this machine"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which no other layer is begun")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the profile; returns 0, or 1 where nothing could be measured."""
    _check(arguments)
    began = time.monotonic()
    try:
        found = tune(arguments.ranks or torch.cuda.device_count(), arguments.limit)
        path = arguments.out or machine.path_of(found["profile"].key)
        write(found["profile"], path)
    except (TuneError, OSError) as error:
        print(f"ds-tileoverlap: tune: {error}", file=sys.stderr)
        return 1
    report = {**found, "profile": asdict(found["profile"]), "path": str(path), "seconds": time.monotonic() - began}
    print(json.dumps(report, indent=2) if arguments.json else _text(report))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.out and arguments.out.exists():
        raise UsageError(f"--out: {arguments.out} exists already")
    if arguments.ranks is not None and arguments.ranks < 2:
        raise UsageError(f"--ranks: got {arguments.ranks}, expected at least 2")
    if not 0 < arguments.limit < float("inf"):
        raise UsageError(f"--limit: got {arguments.limit}, expected a number of seconds above 0")
    if find_spec("scipy") is None:
        raise UsageError("tune: scipy is not installed: python -m pip install scipy")


def tune(num_ranks: int, limit_s: float) -> dict:
    """Measures, fits and confirms.

    Returns:
        ``profile``; ``layers``, the names of those that were measured; ``left_out``: the ``layer`` that the fit did not
        see, the ``error`` of its predictions, and predicted over measured time of each stage and arm.

    Raises:
        TuneError: says what this machine lacks, or what went wrong.
    """
    if (count := torch.cuda.device_count()) < max(num_ranks, 2):
        raise TuneError(f"needs {max(num_ranks, 2)} GPUs that write into each other's memory, found {count}")
    records, link_gbs = measure(num_ranks, limit_s)
    here = machine.describe(num_ranks)
    rest, (left_out,) = (
        [record for record in records if (record["shape"]["name"] == LEFT_OUT) is is_left_out]
        for is_left_out in (False, True)
    )
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    profile = fit.fit(rest, machine.name_of(here), num_sms, link_gbs, here["link"])
    names = [record["shape"]["name"] for record in rest]
    source = {**profile.source, "records": names}
    error = fit.left_out_error(profile, left_out)
    profile = replace(profile, key=here, source=source, left_out_error=error)
    return {
        "profile": profile,
        "layers": [*names, LEFT_OUT],
        "left_out": {"layer": LEFT_OUT, "error": error, "predicted_over_measured": _ratios(profile, left_out)},
    }


def _ratios(profile: Profile, record: dict) -> dict[str, dict[str, float]]:
    return {
        stage.work.stage.name: {arm: fit.ratios([stage], profile, arm)[0] for arm in stage.times_us}
        for stage in fit.measured(record)
    }


def measure(num_ranks: int, limit_s: float) -> tuple[list[dict], float]:
    """The records of the layers, as the stage benchmark has them, and the link's GB/s in one direction.

    Raises:
        TuneError: the group cannot overlap, a rank failed, or the time was too short.
    """
    # Experts of each rank are as many.
    layers = [{**layer, "experts": layer["experts"] // num_ranks * num_ranks} for layer in LAYERS]
    layers = [layer for layer in layers if layer["experts"] >= layer["top_k"]]
    options = ["--layers", json.dumps(layers), "--limit", str(limit_s), "--end", str(limit_s + START_S)]
    records, link_gbs = [], 0.0
    with _progress(len(layers)) as advance:
        for message in messages(num_ranks, options, limit_s + START_S + END_S):
            if "refusal" in message:
                raise TuneError(f"these GPUs cannot overlap, as {message['refusal']}")
            link_gbs = message.get("link_gbs", link_gbs)
            if record := message.get("record"):
                records.append(record)
                advance(record["shape"]["name"])
    wrong = [record["shape"]["name"] for record in records if not record["gate"]["passed"]]
    if wrong:
        raise TuneError(
            f"results of the overlap backend are wrong for {', '.join(wrong)}; ds-tileoverlap doctor may help"
        )
    if len(records) < LEAST_LAYERS:
        raise TuneError(
            f"{len(records)} layers were measured in {limit_s:g} s, fewer than {LEAST_LAYERS}; --limit gives more time"
        )
    return records, link_gbs


def messages(num_ranks: int, options: list[str], limit_s: float) -> Iterator[dict]:
    """The JSON objects that the ranks of ``tune_worker.py`` print, one a line, as they come.

    Raises:
        TuneError: a rank failed, or they did not end in time.
    """
    worker = (num_ranks, f"{__package__}.tune_worker", *options)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            with running(*worker, limit_s=limit_s, stdout=subprocess.PIPE, stderr=log) as launcher:
                yield from (json.loads(line) for line in launcher.stdout if line.startswith('{"'))
        except TimeoutError as error:
            raise TuneError(f"the measurement did not end within {limit_s:.0f} s") from error
        if launcher.returncode:
            log.seek(0)
            raise TuneError(f"the measurement failed: {last_words(log.read())}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, a line for each layer elsewhere; what it yields is called with each layer that is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(name: str) -> None:
            bar.advance(task)
            if not console.is_terminal:
                print(f"measured {name}, {int(bar.tasks[task].completed)} of {total}", file=sys.stderr, flush=True)

        yield advance


def _text(report: dict) -> str:
    profile, left_out = report["profile"], report["left_out"]
    return (
        f"{len(report['layers'])} layers measured on {profile['key']['ranks']} {profile['key']['device']}, "
        f"{profile['link_gbs']:.0f} GB/s, in {report['seconds']:.0f} s\n"
        f"{left_out['layer']}, which the fit has not seen, is predicted within {left_out['error']:.0%}, others within "
        f"{profile['worst_error']:.0%}\n"
        f"auto: comm_sms {profile['comm_sms']}, segments of {profile['segment_bytes'] / 2**20:g} MiB\n"
        f"{report['path']}: written"
    )
