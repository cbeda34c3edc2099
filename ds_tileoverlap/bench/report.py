"""What the records of the benchmarks say, as Markdown: the README's results.

Every figure is computed from a record. Where there are more runs of a benchmark, the first one's medians are shown and,
in parentheses, the range of the others.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Sequence

from .records import (
    BOTH,
    FORWARD,
    GEMMS_ALONE,
    LAYER,
    PEAK,
    STAGE,
    STEP,
    TRAINING,
    WHOLE_STEP,
    Benchmark,
    RecordError,
    Worse,
    worse,
)

# Of the README's lines.
WIDTH = 140
BEGIN, END = "<!-- results -->", "<!-- /results -->"
# What arms are called, in the order of columns; one that is not here comes last, under its own name.
ARMS = {
    "stock": "DeepSpeed MoE",
    "sequential": "ours, `sequential`",
    "ours": "ours, `overlap`",
    "autoep": "AutoEP",
    "autoep_fused": "AutoEP, fused options",
    "ours_autoep": "AutoEP, ours",
    GEMMS_ALONE: "GEMMs alone",
    "torch": "torch's GEMM",
    "gemm": "our GEMM",
    "overlap": "ours, `overlap`",
}
# Arms of ours, and what each is compared with in a line of its own.
SPEEDUPS = (("ours", "stock"), ("ours_autoep", "autoep_fused"), ("ours", "autoep_fused"))
# Stage in which a GEMM and an exchange are one kernel -> its bytes on the link.
FUSED = {"in": "arrive", "down": "return", "down back": "arrive", "in back": "return"}
DIMENSIONS = ("hidden", "intermediate", "experts", "top_k")
# In these the shapes of a family are equal; they differ in tokens, experts and how even their routing is.
FAMILY = ("hidden", "intermediate", "top_k")
VERSIONS = {"torch": "torch", "triton": "triton", "deepspeed": "DeepSpeed", "transformers": "transformers"}
VERSIONS |= {"nccl": "NCCL", "driver": "driver"}


def with_results(readme: str, text: str) -> str:
    """The README with ``text`` between its two markers."""
    before, begin, rest = readme.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RecordError(f"--readme: expected a line {BEGIN} and after it a line {END}")
    return f"{before}{begin}{text}\n{end}{after}"


def figures(benchmarks: list[Benchmark]) -> dict:
    """All measures of all runs, and where ours is not the better arm."""
    return {
        "measures": {run.name: run.measures for benchmark in benchmarks for run in benchmark.runs},
        "worse": [found._asdict() for found in worse(benchmarks)],
    }


def results(benchmarks: list[Benchmark]) -> str:
    """What stands in the README, as Markdown: a part for each kind of benchmark, then where ours is slower."""
    writers = {LAYER: layers, STAGE: stages, STEP: steps, TRAINING: trainings}
    parts = [conditions(benchmarks)]
    for kind, write in writers.items():
        if found := of_kind(benchmarks, kind):
            parts.append(write(found))
    slower = [found for found in worse(benchmarks) if found.measure != PEAK]
    return "\n\n".join(part for part in [*parts, listed("slower", slower)] if part)


def of_kind(benchmarks: list[Benchmark], kind: str) -> list[Benchmark]:
    return [benchmark for benchmark in benchmarks if benchmark.kind == kind]


def conditions(benchmarks: list[Benchmark]) -> str:
    records = [run.record for benchmark in benchmarks for run in benchmark.runs if "environment" in run.record]
    if not records:
        return ""
    machines = {f"{r['ranks']}x {r['environment']['device']}, {_versions(r['environment'])}" for r in records}
    dates = sorted({record["environment"]["date"] for record in records})
    text = f"{' to '.join(dict.fromkeys((*dates[:1], *dates[-1:])))}: {'; '.join(sorted(machines))}."
    if any(len(benchmark.runs) > 1 for benchmark in benchmarks):
        text += " In parentheses: the range of other runs."
    return wrapped(text)


def _versions(environment: dict) -> str:
    return ", ".join(f"{name} {environment[key]}" for key, name in VERSIONS.items() if key in environment)


def layers(benchmarks: list[Benchmark]) -> str:
    """A column for each layer: its arms, then how many times as fast ours are, there and at other token counts."""
    families = families_of(benchmarks)
    plain = [family[0] for family in families]
    arms = in_order({arm for benchmark in plain for arm in benchmark.arms})
    rows = [[label(arm), *(_layer_cell(b, arm) for b in plain)] for arm in arms]
    rows.append(["**times as fast, forward + backward**", *("" for _ in plain)])
    rows += [[_pair(*pair), *(fold(b.speedups(BOTH, *pair)) for b in plain)] for pair in SPEEDUPS]
    found = [{case(b, family[0]): fold(b.speedups(BOTH, "ours", "sequential")) for b in family} for family in families]
    cases = list(dict.fromkeys(name for by_case in found for name in by_case))
    name = f"{_pair('ours', 'sequential')}: {'; '.join(cases)}"
    rows.append([name, *("; ".join(by_case.get(case, "-") for case in cases) for by_case in found)])
    header = ["layer (hidden, intermediate, experts, experts a token), tokens a rank"]
    header += [f"{_dimensions(b)}, {b.shape['tokens']}" for b in plain]
    return f"{table(header, rows)}\n\n{commands(benchmarks)}"


def _pair(mine: str, other: str) -> str:
    return f"{label(mine)} against {label(other)}"


def families_of(benchmarks: list[Benchmark], same: Sequence[str] = FAMILY) -> list[list[Benchmark]]:
    """Benchmarks whose shapes are equal in these; in each family the one with the shortest name comes first."""
    families = defaultdict(list)
    for benchmark in benchmarks:
        families[tuple(benchmark.shape[name] for name in same)].append(benchmark)
    return [sorted(family, key=lambda b: (len(b.shape["name"]), b.shape["tokens"])) for family in families.values()]


def case(benchmark: Benchmark, first: Benchmark) -> str:
    """What sets it apart from the first of its family."""
    experts = benchmark.shape["experts"]
    more = f" {experts} experts" if experts != first.shape["experts"] else ""
    return f"{benchmark.shape['tokens']} tokens{more}{' skewed' if benchmark.shape['rank_spread'] else ''}"


def shape_name(benchmark: Benchmark) -> str:
    return benchmark.shape["name"]


def _dimensions(benchmark: Benchmark) -> str:
    sizes = ", ".join(str(benchmark.shape[name]) for name in DIMENSIONS)
    return f"{shape_name(benchmark)} ({sizes})"


def _layer_cell(benchmark: Benchmark, arm: str) -> str:
    times = f"{shown(benchmark.medians(FORWARD, arm))} / {shown(benchmark.medians(BOTH, arm))} ms"
    return times if arm == GEMMS_ALONE else f"{times}, {shown(benchmark.medians(PEAK, arm)[:1])} GiB"


def stages(benchmarks: list[Benchmark]) -> str:
    lead = (
        "Stages of `overlap`, a GEMM and an exchange in one kernel: times as fast as `sequential`; share of the roof, "
        "max(torch's GEMM, link)."
    )
    # Sizes that two shapes share stand with the first.
    first = [family[0] for family in families_of(benchmarks, DIMENSIONS)]
    header = ["stage", *(_dimensions(b) if b in first else shape_name(b) for b in benchmarks)]
    rows = [[stage, *(_stage_cell(b, stage) for b in benchmarks)] for stage in FUSED]
    returned = (
        "return: down until all rows are there (the faster of rows and sums), against torch's GEMM, "
        "then NCCL's all-to-all"
    )
    rows.append([returned, *(fold(best_return(b)) for b in benchmarks)])
    return "\n\n".join([wrapped(lead), table(header, rows), commands(benchmarks)])


def _stage_cell(benchmark: Benchmark, stage: str) -> str:
    return f"{fold(benchmark.speedups(stage, 'overlap', 'sequential'))}; {roof_share(benchmark, stage):.0%}"


def roof_share(benchmark: Benchmark, stage: str, arm: str = "overlap") -> float:
    """max(compute, link) over the time, of the first run; above 1 where our GEMM is faster than torch's."""
    compute, time = (benchmark.medians(stage, name)[0] for name in ("torch", arm))
    return max(compute, benchmark.record["link_ms"][FUSED[stage]]) / time


def return_arms(benchmark: Benchmark) -> dict[str, dict[int, str]]:
    """How rows return -> number of SMs for couriers -> arm."""
    arms = [arm.split() for arm in benchmark.arms if arm.startswith(("rows", "sums"))]
    return {how: {int(sms): f"{how} {sms}" for each, sms in arms if each == how} for how in ("rows", "sums")}


def best_return(benchmark: Benchmark) -> list[float | None]:
    """Of rows and sums the faster one, on the fewest SMs, for each run."""
    arms = [by_sms[min(by_sms)] for by_sms in return_arms(benchmark).values() if by_sms]
    runs = zip(*(benchmark.speedups("down", arm, "serial") for arm in arms))
    return [max((speed for speed in run if speed), default=None) for run in runs]


def steps(benchmarks: list[Benchmark]) -> str:
    """A line for each model, with the arms of all its benchmarks."""
    arms = in_order({arm for benchmark in benchmarks for arm in benchmark.arms})
    lines: list[tuple[str, dict[str, str]]] = []
    for b in benchmarks:
        model = f"{b.record['layers']} layers of {shape_name(b)}"
        times = {arm: f"{shown(b.medians(WHOLE_STEP, arm))} ms" for arm in b.arms}
        free = (cells for name, cells in lines if name == model and not cells.keys() & times.keys())
        if (cells := next(free, None)) is None:
            lines.append((model, cells := {}))
        cells |= times
    rows = [[model, *(cells.get(arm, "-") for arm in arms)] for model, cells in lines]
    header = ["training step (AutoEP's arms: another model)", *map(label, arms)]
    return f"{table(header, rows)}\n\n{commands(benchmarks)}"


def trainings(benchmarks: list[Benchmark]) -> str:
    return "\n\n".join(wrapped(_training(b.record)) for b in benchmarks)


def _training(record: dict) -> str:
    ours, theirs = (dict(record[name]["train"]) for name in ("overlap", "sequential"))
    apart = [abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()]
    (steps, loss), (_, other) = (record[name]["eval"][-1] for name in ("overlap", "sequential"))
    return (
        f"Evaluation loss after {steps} steps: {loss:.4f} with `overlap`, {other:.4f} with `sequential`; training "
        f"losses differ by {statistics.mean(apart):.3f} on average, {max(apart):.3f} at most (`{record['command']}`)."
    )


def listed(how: str, found: list[Worse]) -> str:
    """A line for each measure: which arm of ours is worse than which other, by how much, in which record."""
    places = defaultdict(lambda: defaultdict(list))
    for place in found:
        places[f"{place.kind}, {place.measure}"][_pair(place.mine, place.other)].append(
            f"{place.run} +{place.extra:.1%}"
        )
    lines = [
        wrapped(f"- {measure}: {'; '.join(f'{pair}: ' + ', '.join(runs) for pair, runs in pairs.items())}")
        for measure, pairs in places.items()
    ]
    head = f"Where an arm of ours is {how} than another package's or than our own sequential one (all places):"
    return "\n".join([head, *(lines or ["- none"])])


def commands(benchmarks: list[Benchmark]) -> str:
    """How the first runs were started, of which commit."""
    return "\n".join(dict.fromkeys(_command(b.record) for b in benchmarks))


def _command(record: dict) -> str:
    command, commit = record["environment"]["command"], record["environment"].get("commit")
    # Records from before ``bench run`` name a file, which torchrun had started.
    by_hand = command.startswith("examples/")
    command = f"torchrun --standalone --nproc_per_node={record['ranks']} {command}" if by_hand else command
    return f"`{command} --out DIR`" + (f" ({commit})" if commit else "")


def in_order(arms: set[str]) -> list[str]:
    return [arm for arm in ARMS if arm in arms] + sorted(arms - ARMS.keys())


def label(arm: str) -> str:
    return ARMS.get(arm, arm)


def shown(values: list[float | None], unit: str = "") -> str:
    """The first run's value and, where there are others, their range."""
    first, *rest = values
    if first is None:
        return "-"
    others = [value for value in rest if value is not None]
    return f"{first:.2f}{unit}" + (f" ({min(others):.2f} to {max(others):.2f})" if others else "")


def fold(values: list[float | None]) -> str:
    return shown(values, "x")


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)
