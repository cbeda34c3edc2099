"""The loss curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def draw(history: dict, path: Path, title: str, unit: str = "nats per byte") -> None:
    """Draws ``history``: "train" and "eval" are lists of [step, loss], "swap" is a step or ``None``."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*history["train"]), label="training batch", linewidth=1, alpha=0.7)
    axes.plot(*zip(*history["eval"]), "o-", label="held-out text")
    if history["swap"] is not None:
        axes.axvline(history["swap"], color="grey", linestyle="--", label="stock MoE -> ds_tileoverlap")
    axes.set(xlabel="optimizer step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
