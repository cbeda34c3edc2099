"""Shapes of layers, from a YAML list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import yaml

from ..arguments import UsageError

# Of a field's type.
EXPECTED = {"str": "letters, digits, - and _", "int": "an integer of at least 1", "float": "a number from 0, below 1"}


@dataclass(frozen=True)
class Sizes:
    """One layer of gated experts; ``tokens`` are per rank."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int


@dataclass(frozen=True)
class LayerShape(Sizes):
    """The spreads make the routing less even (see ``arms.router_weight``)."""

    router_spread: float = 0.0
    rank_spread: float = 0.0


@dataclass(frozen=True)
class StageShape(Sizes):
    """``skew`` is added to the scores of rank 0's experts, which are spread over 1."""

    skew: float = 0.0


def read_shapes(path: Path, kind: type[Sizes], ranks: int, only: tuple[str, ...] = ()) -> list[Sizes]:
    """The shapes of a file, or those of them that ``only`` names, for so many ranks.

    Raises:
        UsageError: lists every fault of the file.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--shapes: {path}: {error}") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"--shapes: {path}: expected a list of shapes, {{name: ..., hidden: ..., ...}}")
    faults = [f"shape {i}: {fault}" for i, entry in enumerate(entries, 1) for fault in _faults(entry, kind, ranks)]
    counts = Counter(str(entry.get("name")) for entry in entries)
    faults += [f"name: got {name} {count} times, expected once" for name, count in counts.items() if count > 1]
    if faults:
        raise UsageError("\n    ".join([f"--shapes: {path}:", *faults]))
    if unknown := [name for name in only if name not in counts]:
        raise UsageError(f"--only: got {', '.join(unknown)}, expected names of {path}: {', '.join(counts)}")
    return [kind(**entry) for entry in entries if not only or entry["name"] in only]


def _faults(entry: dict, kind: type[Sizes], ranks: int) -> Iterator[str]:
    allowed = {field.name: field for field in fields(kind)}
    yield from (f"{key}: not one of {', '.join(allowed)}" for key in entry.keys() - allowed.keys())
    yield from (f"{n}: missing" for n, field in allowed.items() if field.default is MISSING and n not in entry)
    wrong = [name for name, field in allowed.items() if name in entry and not _fits(entry[name], field.type)]
    yield from (f"{name}: got {entry[name]!r}, expected {EXPECTED[allowed[name].type]}" for name in wrong)
    if wrong or not {"experts", "top_k"} <= entry.keys():
        return
    if entry["experts"] % ranks:
        yield f"experts: got {entry['experts']}, expected a multiple of the number of ranks, {ranks}"
    if entry["top_k"] > entry["experts"]:
        yield f"top_k: got {entry['top_k']}, expected at most the number of experts, {entry['experts']}"


def _fits(value: object, kind: str) -> bool:
    if kind == "str":  # it becomes a file's name
        return isinstance(value, str) and re.fullmatch(r"[\w-]+", value) is not None
    if isinstance(value, bool):
        return False
    return (
        isinstance(value, int) and value >= 1 if kind == "int" else isinstance(value, (int, float)) and 0 <= value < 1
    )
