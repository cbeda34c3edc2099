"""A :class:`Forecast` as one JSON object, and for a reader."""

from __future__ import annotations

from dataclasses import asdict

from . import timeline
from .forecast import Forecast


def as_json(forecast: Forecast) -> dict:
    """Times in microseconds, sizes in bytes."""
    profile = forecast.profile
    return {
        "shape": asdict(forecast.shape),
        "ranks": forecast.num_ranks,
        "routing": {**asdict(forecast.uneven), "seed": forecast.seed, "rows": forecast.plan.num_rows},
        "profile": {
            "name": profile.name,
            "link_gbs": profile.link_gbs,
            "link_us": profile.link_us,
            "link_is_measured": profile.link_is_measured,
            "source": profile.source,
        },
        "stages": [asdict(stage) for stage in forecast.stages],
        "overlap_us": forecast.overlap_us,
        "sequential_us": forecast.sequential_us,
        "overlap_pays": forecast.overlap_us < forecast.sequential_us,
        "refusal": forecast.refusal,
        "memory": forecast.memory,
        "choices": [asdict(choice) for choice in forecast.choices],
        "verdict": forecast.verdict,
        "notes": forecast.notes,
    }


def show(forecast: Forecast) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print("us on the fullest rank; roof: the larger of GEMM and link; MB: on the link")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage")
    for column in ("overlap", "sequential", "GEMM", "link", "exposed", "small", "of roof", "MB"):
        table.add_column(column, justify="right")
    for stage in forecast.stages:
        times = (stage.overlap_us, stage.sequential_us, stage.gemm_us, stage.link_us, stage.exposed_us, stage.small_us)
        cells = [f"{us:.0f}" for us in times]
        table.add_row(stage.title, *cells, f"{stage.efficiency:.2f}", f"{stage.link_bytes / 1e6:.1f}")
    console.print(table)
    facts = Table(box=None, show_header=False)
    for choice in forecast.choices:
        facts.add_row(choice.name, Text(f"{choice.value}: {choice.reason}"))
    for name, num_bytes in forecast.memory.items():
        facts.add_row(name.removesuffix("_bytes").replace("_", " "), f"{num_bytes / 2**20:.0f} MiB")
    console.print(facts)
    for stage, work, found in zip(forecast.stages, forecast.works, forecast.timelines):
        console.print(Text(f"\n{stage.title}, {found.end:.0f} us on the device"))
        for line in timeline.text(found, work.stage.arrives):
            console.print(Text(line, no_wrap=True))
    console.print(Text(f"\n{forecast.verdict}", "bold"))
    for note in forecast.notes:
        console.print(Text(f"- {note}"))
