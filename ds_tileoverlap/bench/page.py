"""The page of ``ds-tileoverlap bench report --html``: one file that loads nothing, readable in light and in dark."""

from __future__ import annotations

import io
import re

import matplotlib
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    for axes, stage in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, FUSED):
        _bars(axes, staged, {arm: [[roof_share(b, stage, arm)] for b in staged] for arm in ("sequential", "overlap")})
        axes.set_xticks(axes.get_xticks(), map(shape_name, staged), rotation=20, ha="right")
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
    even = [b for b in of_kind(benchmarks, LAYER) if not b.shape["rank_spread"]]
    families = [family for family in families_of(even) if len(family) > 1]
    if not families:
        return None
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, family in zip(figure.subplots(1, len(families), squeeze=False).flat, families):
        for arm in in_order({arm for b in family for arm in b.arms}):
            points = sorted((b.shape["tokens"], ms) for b in family if (ms := b.medians(BOTH, arm)[0]))
            if len(points) > 1:
                axes.loglog(*zip(*points), "o-", label=_plain(arm), color=COLOURS.get(arm))
        ticks = [b.shape["tokens"] for b in family]
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], map(str, [1, 2, 5, 10, 20, 50, 100]))
        axes.minorticks_off()
        axes.set(title=shape_name(family[0]), xlabel="tokens a rank", ylabel="forward + backward, ms")
    _legend(figure, figure.axes[0])
    return figure


def sms(benchmarks: list[Benchmark]) -> Figure | None:
    swept = [b for b in of_kind(benchmarks, STAGE) if len(return_arms(b)["rows"]) > 1]
    if not swept:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for i, benchmark in enumerate(swept):
        for (how, arms), line in zip(return_arms(benchmark).items(), ("o-", "o--")):
            times = [benchmark.speedups("down", "serial", arm)[0] for arm in arms.values()]
            axes.plot(list(arms), times, line, color=f"C{i}", label=f"{shape_name(benchmark)}, {how}")
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(xlabel="comm_sms (0: spare warps of the GEMM)", ylabel="time over serial", ylim=(0, None))
    axes.legend()
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


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _plain(arm: str) -> str:
    return label(arm).replace("`", "")


PLOTS = {
    "Times as fast: forward + backward": speeds,
    "Stages: max(compute, link) over their time": roofs,
    "Time over tokens": tokens,
    "SMs for couriers of the return": sms,
    "Training": losses,
}
