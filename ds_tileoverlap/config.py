"""The ``"tile_overlap"`` block of ds_config: the options, and the one place that states their ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, dict_raise_error_on_duplicate_keys
from pydantic import ConfigDict, Field, ValidationError

BLOCK = "tile_overlap"
# Options that only the overlap backend reads.
OVERLAP_OPTIONS = (
    "comm_sms",
    "combine",
    "bands_per_segment",
    "owner_alignment",
    "overlap_dispatch",
    "overlap_backward",
    "profile",
)
BACKENDS = ("auto", "overlap", "sequential", "reference")
# Backend -> options that it does not read.
UNREAD = {"sequential": OVERLAP_OPTIONS, "reference": (*OVERLAP_OPTIONS, "recompute_dispatch")}


class ConfigError(ValueError):
    """The ``tile_overlap`` block is wrong; the message lists every fault with name, value and what is allowed."""


class TraceConfig(DeepSpeedConfigModel):
    """Options of ``tile_overlap.trace``."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=1)]
    """The step of this run, counted from 0, that is traced; the first one builds what others need."""

    folder: Annotated[str, Field(min_length=1)]
    """Where its timeline goes."""


class TileOverlapConfig(DeepSpeedConfigModel):
    """Options of the ``tile_overlap`` block. A field's description is what an error message says is expected."""

    model_config = ConfigDict(strict=True)

    enabled: bool = Field(False, description="true or false")
    """Run the MoE layers of the model on this package. ``false`` leaves every layer as DeepSpeed made it."""

    backend: Literal[BACKENDS] = Field(
        "auto",
        description="'auto', 'overlap', 'sequential' or 'reference'",
    )
    """How exchanges and expert GEMMs run. ``overlap`` and ``auto`` overlap where the whole expert-parallel group can,
    and are ``sequential`` elsewhere, with the reason in one line; ``auto`` also where the profile predicts a loss."""

    comm_sms: Annotated[int, Field(ge=0, le=64, multiple_of=2)] | Literal["auto"] = Field(
        "auto", description="'auto' or an even number of SMs, 0 to 64"
    )
    """SMs that the overlap backend gives to communication; 0 leaves it to spare warps of the GEMM's own CTAs."""

    combine: Literal["auto", "rows", "sums"] = Field("auto", description="'auto', 'rows' or 'sums'")
    """Whether every expert row returns on its own, or one sum for each token and rank."""

    bands_per_segment: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        "auto", description="'auto' or an integer, 1 to 64"
    )
    """Row bands (GEMM tile height x full width) that the overlap backend merges into one transfer."""

    owner_alignment: Literal["auto", "tile", "packed"] = Field("auto", description="'auto', 'tile' or 'packed'")
    """Whether an owner's rows start at a tile boundary (zero-padded) or anywhere."""

    overlap_dispatch: bool = Field(True, description="true or false")
    """Overlap the dispatch with the gate/up projections."""

    overlap_backward: bool = Field(True, description="true or false")
    """Overlap both exchanges of the backward pass."""

    profile: Annotated[str, Field(min_length=1)] = Field(
        "auto", description="'auto', 'none', or the path of a file that `ds-tileoverlap tune` wrote"
    )
    """Rates that ``auto`` decides by: those that ``tune`` found on this machine, or else the package's for its GPU."""

    recompute_dispatch: bool = Field(False, description="true or false")
    """Keep no expert rows for backward: it sends the tokens again. Less memory for one more exchange."""

    timeout_s: Annotated[float, Field(ge=5, allow_inf_nan=False)] | None = Field(
        None, description="a number of seconds, at least 5, or null for the expert-parallel group's own time-out"
    )
    """How long a rank waits for the others before it raises: the expert-parallel group's time-out becomes this, shorter
    or longer. Groups that DeepSpeed makes have torch's default (NCCL 10 minutes, gloo 30), whatever
    ``init_distributed`` was given. At least 5, as the host gives up 2 seconds before NCCL's watchdog would."""

    log_every: Annotated[int, Field(ge=0)] = Field(0, description="a number of steps, or 0 for never")
    """Rank 0 prints a line every so many steps: how even the experts' load is, and what was dropped."""

    trace: TraceConfig | None = Field(
        None, description='an object like {"step": 10, "folder": "trace"} with a step of at least 1, or null'
    )
    """Writes the timeline of one training step; see :mod:`ds_tileoverlap.trace`."""


def _expected(name: str) -> str:
    field = TileOverlapConfig.model_fields.get(name)
    return field.description if field else "one of " + ", ".join(TileOverlapConfig.model_fields)


def _conflicts(block: dict[str, Any], faulty: set[str]) -> list[str]:
    """Faults of options that are each valid but do not go together."""
    backend, lines = block.get("backend", "auto"), []
    for name in block:
        readers = [other for other in BACKENDS if name not in UNREAD.get(other, ())]
        if backend in BACKENDS and backend not in readers and name not in faulty:
            lines.append(
                f"{BLOCK}.{name}: got {block[name]!r} together with backend {backend!r}, expected backend "
                f"{' or '.join(map(repr, readers))} (no other reads this option)"
            )
    return lines


def read(path: Path) -> dict[str, Any]:
    """A ds_config file as DeepSpeed reads it.

    Raises:
        ConfigError: it cannot be read, is no object, has a key twice, or its block is wrong; names the file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            ds_config = hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)
        if not isinstance(ds_config, dict):
            raise ConfigError(f"got {ds_config!r}, expected an object")
        parse(ds_config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return ds_config


def parse(ds_config: dict[str, Any]) -> TileOverlapConfig | None:
    """Reads the ``tile_overlap`` block of a ds_config dictionary.

    Args:
        ds_config: the whole DeepSpeed configuration.

    Returns:
        The options, or ``None`` where the block is absent.

    Raises:
        ConfigError: lists every unknown key, wrong type, value out of range and impossible combination at once.
    """
    if BLOCK not in ds_config:
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, dict):
        raise ConfigError(f'ds_config: {BLOCK}: got {block!r}, expected an object like {{"enabled": true}}')
    lines: dict[str, str] = {}
    config = None
    try:
        config = TileOverlapConfig(strict=True, **block)
    except ValidationError as error:
        for fault in error.errors():
            name = str(fault["loc"][0])
            problem = "an unknown option, " if name not in TileOverlapConfig.model_fields else ""
            lines[name] = f"{BLOCK}.{name}: got {problem}{block.get(name)!r}, expected {_expected(name)}"
    faults = list(lines.values()) + _conflicts(block, set(lines))
    if faults:
        raise ConfigError(
            "ds_config: " + "; ".join(faults)
            if len(faults) == 1
            else f"ds_config has {len(faults)} faults:\n  " + "\n  ".join(faults)
        )
    return config
