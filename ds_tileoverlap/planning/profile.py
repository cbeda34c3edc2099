"""Rates of one kind of GPU and link, in a YAML file that says from which records they came."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from ..appearing import appearing
from ..arguments import UsageError

VERSION = 2
FOLDER = Path(__file__).with_name("profiles")
DEFAULT = "h200-nvlink"
# What records say of themselves.
SOURCE = {"device", "driver", "torch", "nccl", "commit", "date", "command", "ranks", "replayed", "records"}


@dataclass(frozen=True)
class Rates:
    """What was fitted. An item is a pair of 128 x 256 tiles on two SMs, a block 64 of K; GB/s are 1e9 bytes a second.

    Attributes:
        gemm_us, item_us, block_us: of the package's GEMM: once, for each item, for each block of an item.
        torch_us, torch_item_us, torch_block_us: of torch's grouped GEMM on the same items.
        throttle: blocks take TFLOP ** throttle as long, TFLOP being the GEMM's work: long GEMMs meet the power limit.
        nccl_us, nccl_gbs: an all-to-all, once and for its remote bytes.
        gather_gbs: torch's gathers of tokens and rows, bytes read and written.
        sum_gbs: the kernels of both backends that sum rows, and that put own rows in place, bytes read and written.
        host_dispatch_us, host_combine_us: what the host needs to launch the sequential stages: the fastest that was
            measured, as none is predicted to be faster.
        arrive_us, return_us: the small kernels around a fused stage, beside the bytes that they move.
        place_gbs, courier_sum_gbs: couriers: expert rows put in place; expert rows read for sums.
        drag_gbs: the GEMM takes a second longer for so many bytes that couriers move beside it.
        host_arrive_us, host_return_us: the same of the fused stages.
    """

    gemm_us: float
    item_us: float
    block_us: float
    torch_us: float
    torch_item_us: float
    torch_block_us: float
    throttle: float
    nccl_us: float
    nccl_gbs: float
    gather_gbs: float
    sum_gbs: float
    host_dispatch_us: float
    host_combine_us: float
    arrive_us: float
    return_us: float
    place_gbs: float
    courier_sum_gbs: float
    drag_gbs: float
    host_arrive_us: float
    host_return_us: float


@dataclass(frozen=True)
class Profile:
    """One kind of GPU and link.

    Attributes:
        key: what a machine must have in common with the one that was measured, as :func:`.machine.describe` has it.
        source: records, GPU, software and date of the measurement.
        measured_gbs: of the link that the rates were measured on, one direction.
        worst_error: largest relative difference between a prediction and a median of the records.
        left_out_error: the same of records that were left out of the fit.
        link_gbs, link_us: of the link that is predicted; latency beyond that of the measured one.
        comm_sms, segment_bytes: what ``auto`` takes: never slower on any measured shape than what it takes elsewhere.
    """

    name: str
    key: dict
    source: dict
    num_sms: int
    worst_error: float
    left_out_error: float
    measured_gbs: float
    link_gbs: float
    link_us: float
    comm_sms: int
    segment_bytes: int
    rates: Rates

    @property
    def margin(self) -> float:
        """Of two predictions further apart than this, in ratio, the larger one is of what was measured as slower."""
        return (1 + self.error) / (1 - self.error) if self.error < 1 else math.inf

    @property
    def error(self) -> float:
        """What a prediction is known to be off by."""
        return max(self.worst_error, self.left_out_error)

    def differences(self, machine: dict) -> list[str]:
        """In what a machine differs from the one that was measured."""
        return [
            f"{name} was {was}, is {machine.get(name)}" for name, was in self.key.items() if machine.get(name) != was
        ]

    @property
    def link_is_measured(self) -> bool:
        return self.link_gbs == self.measured_gbs and self.link_us == 0

    @property
    def courier_gbs(self) -> float:
        """Couriers keep up with the measured link; that they would with a faster one, nobody has seen."""
        return min(self.link_gbs, self.measured_gbs)

    @property
    def all_to_all_gbs(self) -> float:
        return self.rates.nccl_gbs * self.courier_gbs / self.measured_gbs


def load(name: str) -> Profile:
    """The profile of that name in the package, or in the file of that name.

    Raises:
        UsageError: says what is missing or wrong.
    """
    inside = FOLDER / f"{name}.yaml"
    path = inside if inside.exists() else Path(name)
    try:
        found = yaml.safe_load(path.read_bytes())
    except OSError:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise UsageError(f"profile: got {name!r}, expected a YAML file or one of {known}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"profile {path}: {' '.join(str(error).split())}") from error
    version = found.pop("version", None) if isinstance(found, dict) else None
    if version != VERSION:
        raise UsageError(
            f"profile {path}: got version {version}, expected {VERSION}; measure again with ds-tileoverlap tune"
        )
    rates, source = found.pop("rates", None), found.get("source")
    _check_names(path, {"rates": None, **found}, {field.name for field in fields(Profile)})
    _check_names(path, rates, {field.name for field in fields(Rates)})
    _check_names(path, source, SOURCE)
    if not isinstance(found["key"], dict) or "ranks" not in found["key"]:
        raise UsageError(f"profile {path}: key: got {found['key']!r}, expected a mapping with at least ranks")
    for name, value in {**found, **rates}.items():
        if name not in ("name", "key", "source") and not _is_right(name, value):
            raise UsageError(f"profile {path}: {name}: got {value!r}, expected a number like that in {DEFAULT}.yaml")
    return Profile(**found, rates=Rates(**rates))


def _check_names(path: Path, found: object, expected: set[str]) -> None:
    names = found.keys() if isinstance(found, dict) else {repr(found)}
    if names != expected:
        missing, unknown = ", ".join(sorted(expected - names)), ", ".join(map(str, names - expected))
        raise UsageError(f"profile {path}: got {unknown or 'nothing'} in place of {missing or 'nothing'}")


def _is_right(name: str, value: object) -> bool:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    if name == "comm_sms":
        return value in range(0, 65, 2)
    if name == "segment_bytes":
        return isinstance(value, int) and value > 0
    return value >= 2 if name == "num_sms" else value > 0 if name.endswith("_gbs") else value >= 0


def dump(profile: Profile) -> str:
    """The profile as its YAML file holds it."""
    return yaml.safe_dump({"version": VERSION, **asdict(profile)}, sort_keys=False, width=110)


def write(profile: Profile, path: Path) -> None:
    """Puts the profile where a reader finds it whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as part:
        part.write_text(dump(profile), encoding="utf-8")
