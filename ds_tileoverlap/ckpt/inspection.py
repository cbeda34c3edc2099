"""What a checkpoint holds, and whether it is sound."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .checkpoint import Checkpoint, MoELayer
from .files import Entry, count_nonfinite, read


def report(checkpoint: Checkpoint) -> dict[str, Any]:
    """All about a checkpoint as ``ckpt inspect --json`` prints it; reads every tensor, one file at a time."""
    faults = list(checkpoint.faults)
    with tqdm(total=sum(e.nbytes for e in checkpoint.tensors()), unit="B", unit_scale=True, disable=None) as bar:
        others = _contents(checkpoint.others.values(), faults, bar)
        layers = [_layer(layer, faults, bar) for layer in checkpoint.layers]
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        **checkpoint.facts,
        "moe_layers": layers,
        "other_tensors": {**others, "dtypes": _dtypes(checkpoint.others.values())},
        "faults": faults,
    }


def _layer(layer: MoELayer, faults: list[str], bar: tqdm) -> dict[str, Any]:
    kinds = {n: {"shape": list(e.shape), "dtype": _dtype(e)} for x in layer.experts.values() for n, e in x.items()}
    return {
        "prefix": layer.prefix,
        "num_experts": layer.num_experts,
        "missing": layer.missing(),
        "extra": layer.extra(),
        "tensors": kinds,
        "experts": {
            expert: {
                "files": sorted({e.file.name for e in tensors.values()}),
                **_contents(tensors.values(), faults, bar),
            }
            for expert, tensors in sorted(layer.experts.items())
        },
    }


def _contents(entries: Iterable[Entry], faults: list[str], bar: tqdm) -> dict[str, Any]:
    """Size, checksum and soundness of tensors. The checksum knows no names: it stays when a checkpoint is converted."""
    entries, digests, nonfinite = list(entries), [], 0
    for entry, value in zip(entries, read(entries)):
        if count := count_nonfinite(value):
            faults.append(f"{entry}: got {count} NaN or inf, expected finite values")
        nonfinite += count
        digest = hashlib.sha256(f"{_dtype(entry)}{list(entry.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        digests.append(digest.hexdigest())
        bar.update(entry.nbytes)
    return {
        "bytes": sum(entry.nbytes for entry in entries),
        "parameters": sum(math.prod(entry.shape) for entry in entries),
        "nonfinite": nonfinite,
        "sha256": hashlib.sha256("".join(sorted(digests)).encode()).hexdigest(),
    }


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _dtypes(entries: Iterable[Entry]) -> dict[str, int]:
    return dict(Counter(_dtype(entry) for entry in entries))


def show(found: dict[str, Any]) -> None:
    """Prints a :func:`report` for people."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False, markup=False)
    for name in ("path", "kind", "model_type", "tag", "step", "optimizer_files"):
        if name in found:
            value = found[name]
            console.print(f"{name:16}{(', '.join(value) or 'none') if isinstance(value, list) else value}")
    others = found["other_tensors"]
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in others["dtypes"].items())
    console.print(f"{'other tensors':16}{kinds or 'none'}; {others['bytes']:,} bytes, {others['nonfinite']} NaN or inf")
    console.print(_layers_table(found["moe_layers"]), _experts_table(found["moe_layers"]))
    for fault in found["faults"]:
        console.print(f"FAULT {fault}", style="red", soft_wrap=True)
    console.print(f"{len(found['faults'])} faults" if found["faults"] else "sound", soft_wrap=True)


def _layers_table(layers: list[dict[str, Any]]) -> Table:
    table = Table("MoE layer", "prefix", "experts", "missing", "extra", "tensors of an expert", title="MoE layers")
    for i, layer in enumerate(layers):
        tensors = "\n".join(f"{name} {kind['shape']} {kind['dtype']}" for name, kind in layer["tensors"].items())
        lists = (", ".join(map(str, layer[name])) or "-" for name in ("missing", "extra"))
        table.add_row(str(i), layer["prefix"], f"{len(layer['experts'])} of {layer['num_experts']}", *lists, tensors)
    return table


def _experts_table(layers: list[dict[str, Any]]) -> Table:
    table = Table("MoE layer", "expert", "files", "bytes", "NaN or inf", "sha256 (first 16)", title="Experts")
    for i, layer in enumerate(layers):
        for number, expert in layer["experts"].items():
            sizes = f"{expert['bytes']:,}", str(expert["nonfinite"])
            table.add_row(str(i), str(number), "\n".join(expert["files"]), *sizes, expert["sha256"][:16])
    return table
