"""``ds-tileoverlap plan``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..arguments import UsageError, at_least_one, block_of, shape, whole
from ..config import BLOCK, parse
from . import machine, report, timeline
from .forecast import Forecast
from .profile import DEFAULT, Profile, load
from .routing import Unevenness


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", type=shape, required=True, help="one layer of gated experts: H=2048,I=768,E=128,k=8,tokens=8192"
    )
    parser.add_argument("--ranks", type=at_least_one, required=True, help="of the expert-parallel group")
    parser.add_argument("--config", type=Path, help="a ds_config file with the layer's options")
    parser.add_argument(
        "--profile",
        default=machine.AUTO,
        help=f"name or YAML file of the rates; default: those of this machine if known, {DEFAULT} otherwise",
    )
    parser.add_argument("--skew", type=_share, default=0.0, help="added to rank 0's scores, 0 to 1; default: 0, even")
    parser.add_argument("--spread", type=_share, default=0.0, help="of scores within a rank, 0 to 1; default: 0")
    parser.add_argument("--seed", type=whole, default=0, help="of the routing")
    parser.add_argument("--link-gbs", type=_positive, help="another link: GB/s in one direction")
    parser.add_argument("--link-us", type=_at_least_0, help="another link: so much more latency than the measured one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, help="draw the simulated rank's timeline")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the forecast; returns 0.

    Raises:
        UsageError: nothing can be predicted, or the drawing is there already.
    """
    try:
        forecast = _forecast(arguments)
        if arguments.png:
            timeline.draw(forecast, arguments.png)
            print(f"{arguments.png}: written", file=sys.stderr)
    except OSError as error:
        raise UsageError(error) from error
    if arguments.json:
        print(json.dumps(report.as_json(forecast), indent=2))
    else:
        report.show(forecast)
    return 0


def _forecast(arguments: argparse.Namespace) -> Forecast:
    if arguments.png and arguments.png.suffix.lower() != ".png":
        raise UsageError(f"--png: got {arguments.png}, expected a name that ends in .png")
    if arguments.png and arguments.png.exists():
        raise UsageError(f"--png: {arguments.png} exists already")
    if arguments.png and find_spec("matplotlib") is None:
        raise UsageError("--png: matplotlib is not installed: python -m pip install matplotlib")
    overrides = {"link_gbs": arguments.link_gbs, "link_us": arguments.link_us}
    profile = replace(_profile(arguments), **{name: value for name, value in overrides.items() if value is not None})
    config = parse({BLOCK: block_of(arguments.config)})
    uneven = Unevenness(arguments.skew, arguments.spread)
    return Forecast(arguments.shape, arguments.ranks, profile, config, uneven, arguments.seed)


def _profile(arguments: argparse.Namespace) -> Profile:
    if arguments.profile != machine.AUTO:
        return load(arguments.profile)
    found, ignored = machine.find(machine.AUTO, machine.describe(arguments.ranks))
    for line in ignored:
        print(f"ds-tileoverlap: {line}", file=sys.stderr)
    return found or load(DEFAULT)


def _share(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _positive(text: str) -> float:
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def _at_least_0(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "a number of at least 0")


def _number(text: str, is_allowed, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return value
