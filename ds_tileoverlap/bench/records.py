"""Records of the benchmarks: what each run measured, and every place where ours did not do better.

A folder holds ``NAME.json``, and of further runs of the same benchmark ``NAME.2.json``, ``NAME.3.json`` and so on.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LAYER, STAGE, STEP, TRAINING = "layer", "stage", "training step", "training"
# Which benchmark wrote a record: a field that only its records have.
FIELDS = {"arms": LAYER, "times_ms": STAGE, "step_ms": STEP, "overlap": TRAINING}
FORWARD, BOTH, WHOLE_STEP, PEAK = "forward", "forward + backward", "forward + backward + optimizer", "peak memory"
GEMMS_ALONE = "gemms_alone"
# Measure -> arm -> median, p10, p90 and samples; a peak and the GEMMs alone have a median only.
Measures = dict[str, dict[str, dict[str, float]]]


class RecordError(Exception):
    """Records, or a file to be rewritten, that do not fit; the message names each file and its fault."""


class Run(NamedTuple):
    name: str
    kind: str
    record: dict
    measures: Measures


class Benchmark(NamedTuple):
    """The runs of one benchmark on one shape: the first is what is reported, the others say how much it varies."""

    runs: list[Run]

    @property
    def record(self) -> dict:
        return self.runs[0].record

    @property
    def kind(self) -> str:
        return self.runs[0].kind

    @property
    def shape(self) -> dict:
        return self.record.get("shape", {})

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for arms in self.runs[0].measures.values() for arm in arms))

    def medians(self, measure: str, arm: str) -> list[float | None]:
        """One for each run, ``None`` where it did not measure this arm."""
        found = [run.measures.get(measure, {}).get(arm) for run in self.runs]
        return [summary and summary["median"] for summary in found]

    def speedups(self, measure: str, mine: str, other: str) -> list[float | None]:
        """How many times as fast ``mine`` is as ``other``, for each run."""
        pairs = zip(self.medians(measure, mine), self.medians(measure, other))
        return [theirs / ours if ours and theirs else None for ours, theirs in pairs]


class Worse(NamedTuple):
    """``mine`` took more time, or memory, than ``other``: by ``extra``, 0.25 being a quarter more."""

    run: str
    kind: str
    measure: str
    mine: str
    other: str
    extra: float


def read(folder: Path) -> list[Benchmark]:
    """All benchmarks of a folder, those with many experts first.

    Raises:
        RecordError: there is no record, or a file is none, or no result, or not of the benchmark that its name says.
    """
    numbered: dict[str, dict[int, Run]] = defaultdict(dict)
    faults = []
    for path in folder.glob("*.json"):
        name, number = re.fullmatch(r"(.+?)(?:\.(\d+))?", path.stem).groups()
        try:
            numbered[name][int(number or 1)] = _run(path)
        except RecordError as error:
            faults.append(f"{path}: {error}")
    benchmarks = [Benchmark([runs[number] for number in sorted(runs)]) for runs in numbered.values() if runs]
    for first, *others in (benchmark.runs for benchmark in benchmarks):
        expected = (first.kind, first.record.get("shape"))
        wrong = [run.name for run in others if (run.kind, run.record.get("shape")) != expected]
        faults += [f"{folder / name}.json: another benchmark or shape than {first.name}.json" for name in wrong]
    if not benchmarks and not faults:
        faults = [f"{folder}: no records (*.json)"]
    if faults:
        raise RecordError("\n".join(sorted(faults)))
    return sorted(benchmarks, key=lambda b: (-b.shape.get("experts", 0), b.runs[0].name))


def _run(path: Path) -> Run:
    try:
        record = json.loads(path.read_text())
        kind = next((kind for field, kind in FIELDS.items() if field in record), None)
        if kind is None:
            raise RecordError(f"not a record of a benchmark, which has one of the fields {', '.join(FIELDS)}")
        return Run(path.stem, kind, record, _measures(kind, record))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecordError(f"not a record of a benchmark: {error!r}") from error


def _measures(kind: str, record: dict) -> Measures:
    if kind == TRAINING:
        return {}
    if "nccl" not in record["environment"]:
        raise RecordError(f"a smoke test on {record['environment']['device']} is no result")
    # Those of stages and steps have a gate since ``bench run``.
    if not record.get("gate", {"passed": kind != LAYER})["passed"]:
        raise RecordError("its equality gate failed, so that it has no times")
    if kind == STEP:
        return {WHOLE_STEP: record["step_ms"]}
    measures: Measures = defaultdict(dict)
    if kind == STAGE:
        for name, summary in record["times_ms"].items():
            stage, arm = name.split(": ")
            measures[stage][arm] = summary
        return dict(measures)
    for name, arm in record["arms"].items():
        measures[FORWARD][name], measures[BOTH][name] = arm["forward_ms"], arm["forward_backward_ms"]
        measures[PEAK][name] = {"median": arm["peak_gib"]}
    measures[FORWARD][GEMMS_ALONE] = {"median": record["gemms_alone_ms"]["forward"]}
    measures[BOTH][GEMMS_ALONE] = {"median": record["gemms_alone_ms"]["forward_backward"]}
    return dict(measures)


def worse(benchmarks: list[Benchmark]) -> list[Worse]:
    """Every place, in every run, where an arm of ours has a larger median than one that it is compared with."""
    return [
        Worse(run.name, run.kind, measure, mine, other, arms[mine]["median"] / arms[other]["median"] - 1)
        for benchmark in benchmarks
        for run in benchmark.runs
        for measure, arms in run.measures.items()
        for mine, other in _compared(run.kind, list(arms))
        if arms[mine]["median"] > arms[other]["median"]
    ]


def _compared(kind: str, arms: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs: an arm of ours, and another package's or our sequential backend (as it is, or on pieces of the tokens)."""
    if kind == STAGE:
        returns = [(arm, "serial") for arm in arms if arm.startswith(("rows", "sums"))]
        yield from (pair for pair in [("overlap", "sequential"), ("gemm", "torch"), *returns] if {*pair} <= {*arms})
        return
    baselines = {arm for arm in arms if arm.startswith(("sequential", "chunks"))}
    others = {*arms} - {"ours", "ours_autoep", GEMMS_ALONE} - baselines
    for mine, against in (("ours", others | baselines), ("ours_autoep", others | baselines), ("sequential", others)):
        for other in arms:
            # Steps of AutoEP's arms are those of another model.
            alike = kind != STEP or ("autoep" in mine) == ("autoep" in other)
            if mine in arms and other in against and alike:
                yield mine, other
