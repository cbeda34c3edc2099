"""Finds the rates of a profile in records of ``ds-tileoverlap bench run stages``.

    python -m ds_tileoverlap.planning.fit --name NAME --num-sms 132 --link NV18 examples/results/stages-*.json > FILE

Predicted over measured times go to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from ..config import TileOverlapConfig
from ..schedule import SEGMENT_BYTES
from ..symmetric_layout import choose_returns
from .profile import Profile, Rates, dump
from .routing import Shape, Unevenness, draw
from .stages import Work, fused_us, gemm_us, sequential_us, serial_us, works

# The routing of bench/stages.py.
SPREAD = 0.15
# Arm -> how it is predicted.
ARMS: dict[str, Callable[[Work, Profile], float]] = {
    "gemm": gemm_us,
    "torch": lambda work, profile: gemm_us(work, profile, by_torch=True),
    "serial": serial_us,
    "sequential": sequential_us,
    "overlap": fused_us,
}
ARRIVING, RETURNING = {True}, {False}
# One after the other: arms, in which stages, and the rates that are found there, each with where the search begins.
SEARCHES = (
    (("gemm", "torch"), ARRIVING | RETURNING, dict(gemm_us=10, item_us=2, block_us=0.5, torch_us=10, torch_item_us=2,
                                                   torch_block_us=0.5, throttle=0.05)),
    (("serial",), RETURNING, dict(nccl_us=50, nccl_gbs=300)),
    (("sequential",), ARRIVING | RETURNING, dict(gather_gbs=4000, sum_gbs=4000)),
    (("overlap",), ARRIVING, dict(arrive_us=20, place_gbs=600, drag_gbs=3000)),
    (("overlap",), RETURNING, dict(return_us=20, courier_sum_gbs=600)),
)  # fmt: skip
# A courier that is fast enough leaves no trace in the times: from there no search finds back, so there are three.
SCALES = (0.5, 1.0, 2.0)
# What another setting has to gain: less is noise.
WORTH = 0.02
# Rate of the host -> the arm that it limits, and whether in stages where rows arrive.
HOST = {
    "host_dispatch_us": ("sequential", True),
    "host_combine_us": ("sequential", False),
    "host_arrive_us": ("overlap", True),
    "host_return_us": ("overlap", False),
}


@dataclass(frozen=True)
class Measured:
    """One stage of a record."""

    shape: str
    work: Work
    times_us: dict[str, float]


def measured(record: dict, seed: int = 0) -> list[Measured]:
    """The stages of a record, on routing drawn as it was for the record."""
    shape = Shape(*(record["shape"][name] for name in ("hidden", "intermediate", "experts", "top_k", "tokens")))
    plan = draw(shape, record["ranks"], Unevenness(record["shape"].get("skew", 0.0), SPREAD), seed)
    plan = plan.but(returns=choose_returns(TileOverlapConfig(), plan.tally, shape.row_bytes))
    times = {name: found["median"] * 1e3 for name, found in record["times_ms"].items()}
    return [Measured(record["shape"]["name"], work, _of_stage(times, work.stage.name)) for work in works(shape, plan)]


def _of_stage(times: dict[str, float], stage: str) -> dict[str, float]:
    """Serial is there for one stage only."""
    return {arm: times[f"{stage}: {arm}"] for arm in ARMS if f"{stage}: {arm}" in times}


def fit(records: Sequence[dict], name: str, num_sms: int, link_gbs: float, link: str) -> Profile:
    """The profile under which predictions of all arms and stages differ least from the records, in ratio.

    Args:
        link: how the GPUs are joined, as :func:`.machine.describe` has it.
    """
    stages = [stage for record in records for stage in measured(record)]
    starts = {name: value for *_, rates in SEARCHES for name, value in rates.items()}
    rates = Rates(**starts, **{rate: _fastest(stages, *limits) for rate, limits in HOST.items()})
    source = _source(records)
    key = {"device": source["device"], "link": link, "ranks": source["ranks"]}
    comm_sms = never_slower(records, 0, lambda record: f"down: {record['returns']}")
    segment_bytes = never_slower(records, SEGMENT_BYTES, lambda record: "down: segments")
    profile = Profile(name, key, source, num_sms, 0.0, 0.0, link_gbs, link_gbs, 0.0, comm_sms, segment_bytes, rates)
    for arms, kinds, found in SEARCHES:
        of_kinds = [stage for stage in stages if stage.work.stage.arrives in kinds]
        profile = _fitted(profile, list(found), arms, of_kinds)
    profile = replace(profile, rates=Rates(*(float(f"{value:.4g}") for value in astuple(profile.rates))))
    return replace(profile, worst_error=_worst(stages, profile))


def left_out_error(profile: Profile, record: dict) -> float:
    """The largest relative difference between a prediction and a median of a record that the profile has not seen."""
    return _worst(measured(record), profile)


def _worst(stages: list[Measured], profile: Profile) -> float:
    return round(float(max(abs(ratio - 1) for arm in ARMS for ratio in ratios(stages, profile, arm))), 3)


def never_slower(records: Sequence[dict], usual: int, arm: Callable[[dict], str]) -> int:
    """The setting that was slower than the usual one in no record, and faster by 2% on average; or else the usual one.

    Args:
        arm: of a record; its times are those of the arms of this name, a blank, and the setting.
    """
    found: dict[int, list[float]] = {}
    for record in records:
        before = f"{arm(record)} "
        times = {k.removeprefix(before): v["median"] for k, v in record["times_ms"].items() if k.startswith(before)}
        for setting, ms in times.items():
            found.setdefault(int(setting), []).append(ms / times[str(usual)])
    averages = {
        setting: math.prod(ratios) ** (1 / len(ratios))
        for setting, ratios in found.items()
        if len(ratios) == len(records) and max(ratios) <= 1
    }
    best = min(averages, key=averages.get, default=usual)
    return best if averages.get(best, 1.0) < 1 - WORTH else usual


def _fastest(stages: list[Measured], arm: str, arrives: bool) -> float:
    return min(stage.times_us[arm] for stage in stages if stage.work.stage.arrives == arrives)


def _fitted(profile: Profile, names: list[str], arms: tuple[str, ...], stages: list[Measured]) -> Profile:
    """The profile with those rates that predict those arms best."""
    from scipy.optimize import least_squares

    def with_rates(logs: np.ndarray) -> Profile:
        return replace(profile, rates=replace(profile.rates, **dict(zip(names, np.exp(logs).tolist()))))

    def off(logs: np.ndarray) -> list[float]:
        found = with_rates(logs)
        return [np.log(ratio) for arm in arms for ratio in ratios(stages, found, arm)]

    def search(scale: float):
        """A few wild measurements shall not turn the rest; no rate leaves three decades around its start."""
        start = np.log([getattr(profile.rates, name) * scale for name in names])
        return least_squares(off, start, loss="soft_l1", f_scale=0.05, bounds=(start - 7, start + 7), diff_step=1e-3)

    return with_rates(min(map(search, SCALES), key=lambda found: found.cost).x)


def ratios(stages: list[Measured], profile: Profile, arm: str) -> list[float]:
    """Predicted over measured time."""
    return [ARMS[arm](stage.work, profile) / stage.times_us[arm] for stage in stages if arm in stage.times_us]


def _source(records: Sequence[dict]) -> dict:
    """What the records say of themselves.

    Raises:
        ValueError: they are of different GPUs or software, or were measured in different ways.
    """
    kinds = [
        {
            **{key: record["environment"].get(key) for key in ("device", "driver", "torch", "nccl", "commit", "date")},
            "command": record["environment"]["command"],
            "ranks": record["ranks"],
            "replayed": record["replayed"],
        }
        for record in records
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"records: got different environments, {kinds}; expected one")
    return {**kinds[0], "records": [f"stages-{record['shape']['name']}.json" for record in records]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Finds the rates of a profile in records of ds-tileoverlap bench run stages."
    )
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="of the profile")
    parser.add_argument("--num-sms", type=int, required=True, help="of the GPU")
    parser.add_argument("--link-gbs", type=float, default=378.0, help="of which link_ms of the records speaks")
    parser.add_argument("--link", required=True, help="what nvidia-smi topo -m shows between the GPUs: NV18")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text()) for path in arguments.records]
    rest = arguments.name, arguments.num_sms, arguments.link_gbs, arguments.link
    profile = fit(records, *rest)
    # The smallest layer alone shows what the host needs: without it, that is not known.
    smallest = min(records, key=lambda record: record["times_ms"]["in: gemm"]["median"])
    errors = {
        left_out["shape"]["name"]: left_out_error(fit([r for r in records if r is not left_out], *rest), left_out)
        for left_out in records
        if left_out is not smallest
    }
    print(f"errors where left out: {errors}", file=sys.stderr)
    print(dump(replace(profile, left_out_error=max(errors.values(), default=0.0))), end="")
    for stage in (stage for record in records for stage in measured(record)):
        words = "  ".join(f"{arm} {ARMS[arm](stage.work, profile) / us:.2f}" for arm, us in stage.times_us.items())
        print(f"{stage.shape:18s} {stage.work.stage.name:10s} {words}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
