"""The page of ``ds-tileoverlap bench report --html``: one file that loads nothing, readable in light and in dark."""

from __future__ import annotations

import io
import re

import matplotlib
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .records import BOTH, GEMMS_ALONE, LAYER, PEAK, STAGE, STEP, TRAINING, Benchmark, worse
from .report import (
    FUSED,
    families_of,
    in_order,
    label,
    listed,
    of_kind,
    results,
    return_arms,
    roof_share,
    shape_name,
    table,
)

TITLE = "ds_tileoverlap: benchmarks"
# What a family's times are of.
WORK = {LAYER: "forward + backward", STAGE: "all fused stages"}
LETTERS = {"hidden": "H", "intermediate": "I", "experts": "E", "top_k": "k", "tokens": "T"}
# Lines of a plot in this colour get the text's.
INK = "#123456"
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": TITLE,
}
# Arms without one follow matplotlib's cycle.
COLOURS = {
    "stock": "#999999",
    "sequential": "#e69f00",
    "ours": "#3a8fd0",
    "autoep": "#cc79a7",
    "autoep_fused": "#d55e00",
    "ours_autoep": "#009e73",
    "overlap": "#3a8fd0",
    "torch": "#8c564b",
    "gemm": "#bcbd22",
    GEMMS_ALONE: "#8c564b",
    "chunks_2": "#9467bd",
}
CSS = """
:root { color-scheme: light dark }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px }
th, td { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; font-variant-numeric: tabular-nums }
code { font-size: 85%; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
"""
HOW = """
Times are medians of maxima over the ranks, in ms; p10 and p90 stand in the last tables. All arms of a benchmark run in
one process and alternate burst by burst, on the same weights, routing and inputs; dropless, bf16, expert parallel over
all ranks, routing included. An equality gate comes first: no time is taken where outputs or gradients differ from those
of DeepSpeed's layer (or of the plain reference, where DeepSpeed's is not timed). The roof of a stage is the larger of
torch's grouped GEMM and its bytes on the link; a faster GEMM of ours passes it.

`overlap` and `sequential` are DeepSpeed's layer, converted, on the two backends; "AutoEP, ours" is AutoEP's layer,
converted; "GEMMs alone" are torch's grouped GEMMs of the layer with nothing around them; "chunks_N" is `sequential` on
N pieces of the tokens. Dots on bars are other runs.

Return: the down projection until all rows are at their tokens' rank, over torch's grouped GEMM and then NCCL's
all-to-all ("serial"); comm_sms 0 are spare warps of the GEMM. Rows return one by one ("rows"), or summed for each token
and rank ("sums").
"""


def page(benchmarks: list[Benchmark]) -> str:
    """The whole page as HTML."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render
    larger = [found for found in worse(benchmarks) if found.measure == PEAK]
    body = [html(f"# {TITLE}\n{HOW}\n## Results\n\n{results(benchmarks)}\n\n{listed('larger in memory', larger)}")]
    with matplotlib.rc_context(STYLE):
        for heading, draw in PLOTS.items():
            if figure := draw(benchmarks):
                body += [html(f"## {heading}"), _svg(figure, f"{draw.__name__}-")]
    body.append(html("## Percentiles: median (p10 to p90)"))
    body += [html(percentiles(found)) for kind in (LAYER, STAGE, STEP) if (found := of_kind(benchmarks, kind))]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{TITLE}</title>'
    head += f"<style>{CSS}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{"".join(body)}</body></html>\n'


def percentiles(benchmarks: list[Benchmark]) -> str:
    """Every arm of every run: median (p10 to p90) of each measure."""
    measures = list(benchmarks[0].runs[0].measures)
    rows = [
        [run.name, label(arm), *(_percentiles(run.measures.get(measure, {}).get(arm)) for measure in measures)]
        for benchmark in benchmarks
        for run in benchmark.runs
        for arm in in_order({arm for arms in run.measures.values() for arm in arms})
    ]
    return table(["record", "arm", *measures], rows)


def _percentiles(summary: dict[str, float] | None) -> str:
    if not summary:
        return "-"
    spread = f" ({summary['p10']:.3f} to {summary['p90']:.3f})" if "p10" in summary else ""
    return f"{summary['median']:.3f}{spread}"


def _svg(figure: Figure, prefix: str) -> str:
    """A figure as an element of the page, with names of its own and in the page's colours."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", text.getvalue())
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def speeds(benchmarks: list[Benchmark]) -> Figure | None:
    plain = [family[0] for family in families_of(of_kind(benchmarks, LAYER))]
    if not plain:
        return None
    others = in_order({arm for b in plain for arm in b.arms} - {"ours", "ours_autoep", GEMMS_ALONE})
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, mine in zip(figure.subplots(1, 2, sharey=True), ("ours", "ours_autoep")):
        _bars(axes, plain, {other: [b.speedups(BOTH, mine, other) for b in plain] for other in others}, base=1)
        axes.set(title=f"{_plain(mine)}: times as fast as", yscale="log")
        axes.set_yticks([1, 2, 5, 10], ["1x", "2x", "5x", "10x"])
        axes.minorticks_off()
    _legend(figure, axes)
    return figure


def roofs(benchmarks: list[Benchmark]) -> Figure | None:
    staged = of_kind(benchmarks, STAGE)
    if not staged:
        return None
    columns = 2 if len(staged) <= 10 else 1
    figure = Figure(figsize=(10, 11 / columns), layout="constrained")
    for axes, stage in zip(figure.subplots(4 // columns, columns, sharex=True, sharey=True).flat, FUSED):
        _bars(axes, staged, {arm: [[roof_share(b, stage, arm)] for b in staged] for arm in ("sequential", "overlap")})
        axes.set_xticks(axes.get_xticks(), map(shape_name, staged), rotation=45, ha="right")
        axes.set_title(stage)
    _legend(figure, axes)
    return figure


def _bars(axes: Axes, benchmarks: list[Benchmark], bars: dict[str, list[list[float | None]]], base: float = 0) -> None:
    """Arm -> benchmark -> a value of each run: a bar from ``base`` for the first, a dot for each other."""
    width = 0.8 / len(bars)
    for i, (arm, of_benchmarks) in enumerate(bars.items()):
        places = [group + (i - (len(bars) - 1) / 2) * width for group in range(len(benchmarks))]
        heights = [(base if first is None else first) - base for first, *_ in of_benchmarks]
        axes.bar(places, heights, width, base, label=_plain(arm), color=COLOURS.get(arm))
        dots = [(x, y) for x, (_, *others) in zip(places, of_benchmarks) for y in others if y is not None]
        axes.scatter([x for x, _ in dots], [y for _, y in dots], s=8, color=INK, zorder=3)
    axes.set_xticks(range(len(benchmarks)), map(shape_name, benchmarks))
    axes.axhline(1, color=INK, linewidth=1)


def tokens(benchmarks: list[Benchmark]) -> Figure | None:
    return _growth(of_kind(benchmarks, LAYER), "tokens")


def experts(benchmarks: list[Benchmark]) -> Figure | None:
    return _growth(of_kind(benchmarks, LAYER), "experts")


def stage_tokens(benchmarks: list[Benchmark]) -> Figure | None:
    return _growth(of_kind(benchmarks, STAGE), "tokens")


def stage_experts(benchmarks: list[Benchmark]) -> Figure | None:
    return _growth(of_kind(benchmarks, STAGE), "experts")


def _growth(benchmarks: list[Benchmark], size: str) -> Figure | None:
    """Times over sizes: axes for each family whose shapes, of even routing, differ in nothing else."""
    even = [b for b in benchmarks if not any(b.shape.get(name) for name in ("rank_spread", "skew"))]
    same = [name for name in LETTERS if name != size]
    families = [family for family in families_of(even, same) if len({b.shape[size] for b in family}) > 1]
    if not families:
        return None
    figure, all_axes = _grid(len(families))
    for axes, family in zip(all_axes, families):
        for arm in in_order({arm for b in family for arm in b.arms}):
            times = {b.shape[size]: ms for b in reversed(family) if (ms := _whole(b, arm))}
            if len(times) > 1:
                axes.loglog(*zip(*sorted(times.items())), "o-", label=_plain(arm), color=COLOURS.get(arm))
        ticks = sorted({b.shape[size] for b in family})
        axes.set_xticks(ticks, map(str, ticks))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set(
            title=_in_common(family[0], same),
            xlabel="tokens a rank" if size == "tokens" else size,
            ylabel=f"{WORK[family[0].kind]}, ms",
        )
    _legend(figure, *all_axes)
    return figure


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    """So many small plots, at most four in a row."""
    columns, rows = min(count, 4), -(-count // 4)
    figure = Figure(figsize=(10, 3.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _in_common(benchmark: Benchmark, same: list[str]) -> str:
    """What the shapes of its family share: of stages, whose families differ in little, the sizes; else the name."""
    if benchmark.kind == LAYER:
        return shape_name(benchmark)
    sizes = [f"{LETTERS[name]} {benchmark.shape[name]}" for name in same]
    return f"{', '.join(sizes[:2])}\n{', '.join(sizes[2:])}"


def _whole(benchmark: Benchmark, arm: str) -> float | None:
    """Milliseconds of a layer's forward + backward, or of its four fused stages; ``None`` where one was not timed."""
    parts = [BOTH] if benchmark.kind == LAYER else FUSED
    times = [benchmark.medians(part, arm)[0] for part in parts]
    return None if None in times else sum(times)


def sms(benchmarks: list[Benchmark]) -> Figure | None:
    swept = [b for b in of_kind(benchmarks, STAGE) if len(return_arms(b)["rows"]) > 1]
    if not swept:
        return None
    figure, all_axes = _grid(len(swept))
    for axes, benchmark in zip(all_axes, swept):
        for (how, arms), line in zip(return_arms(benchmark).items(), ("o-", "o--")):
            times = [benchmark.speedups("down", "serial", arm)[0] for arm in arms.values()]
            axes.plot(list(arms), times, line, label=how)
        axes.axhline(1, color=INK, linewidth=1)
        axes.set(title=shape_name(benchmark), xlabel="comm_sms", ylabel="time over serial", ylim=(0, None))
    _legend(figure, *all_axes)
    return figure


def losses(benchmarks: list[Benchmark]) -> Figure | None:
    trained = [benchmark.record for benchmark in of_kind(benchmarks, TRAINING)]
    if not trained:
        return None
    figure = Figure(figsize=(10, 3.4 * len(trained)), layout="constrained")
    for (curves, apart), record in zip(figure.subplots(len(trained), 2, squeeze=False), trained):
        for arm, line, mark in (("overlap", "-", "o"), ("sequential", "--", "x")):
            curves.plot(*zip(*record[arm]["train"]), line, color=COLOURS[arm], label=f"{arm}, training")
            curves.plot(*zip(*record[arm]["eval"]), mark, color=COLOURS[arm], label=f"{arm}, evaluation")
        curves.set(xlabel="step", ylabel="loss")
        curves.legend()
        other = dict(record["sequential"]["train"])
        apart.plot(*zip(*((step, loss - other[step]) for step, loss in record["overlap"]["train"])), color=INK)
        apart.set(xlabel="step", ylabel="training loss: overlap - sequential")
    return figure


def _legend(figure: Figure, *all_axes: Axes) -> None:
    """One for all, below; at most five names in a row."""
    handles = {name: handle for axes in all_axes for handle, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 5))


def _plain(arm: str) -> str:
    return label(arm).replace("`", "")


PLOTS = {
    "Times as fast: forward + backward": speeds,
    "Stages: efficiency, max(compute, link) over their time": roofs,
    "Time over tokens": tokens,
    "Time over experts": experts,
    "Stages: time over tokens": stage_tokens,
    "Stages: time over experts": stage_experts,
    "Return: SMs for couriers": sms,
    "Training": losses,
}
