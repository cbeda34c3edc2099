"""Which profile holds on this machine: the one that ``ds-tileoverlap tune`` wrote here, or one of the package."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import torch
import triton

from .. import __version__
from ..arguments import UsageError
from ..programs import driver_version, printed_by
from .profile import FOLDER, Profile, load

# As in ds_config: look for one; have none.
AUTO, NONE = "auto", "none"


def describe(num_ranks: int) -> dict[str, str | int]:
    """What measured times depend on: the GPUs and their link, how many take part, and the software."""
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "no GPU",
        "link": link_of(printed_by("nvidia-smi", "topo", "-m")),
        "ranks": num_ranks,
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else "",
        "deepspeed": metadata.version("deepspeed"),
        "ds_tileoverlap": __version__,
    }


def link_of(topology: str) -> str:
    """What ``nvidia-smi topo -m`` shows between GPUs, each kind once: ``NV18``; ``unknown`` where it shows none."""
    lines = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds = {cell for line in lines for cell in line[1 : len(lines) + 1]} - {"X"}
    return ",".join(sorted(kinds)) or "unknown"


def folder() -> Path:
    """Where ``tune`` keeps profiles: in the user's cache, as the XDG rules have it."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "ds_tileoverlap"


def path_of(machine: dict) -> Path:
    """The file of the profile that ``tune`` makes of such a machine."""
    return folder() / f"{name_of(machine)}.yaml"


def name_of(machine: dict) -> str:
    """``NVIDIA-H200-NV18-x2``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{machine['device']}-{machine['link']}-x{machine['ranks']}")


def find(name: str, machine: dict) -> tuple[Profile | None, list[str]]:
    """The profile that holds on a machine, and a line for each file that does not, with the reason.

    Args:
        name: :data:`AUTO`, :data:`NONE`, or a name or path as :func:`~.profile.load` takes it.
        machine: as :func:`describe` has it.
    """
    tuned, ignored = path_of(machine), []
    packaged = [file.stem for file in sorted(FOLDER.glob("*.yaml"))]
    names = {AUTO: [*([str(tuned)] if tuned.exists() else []), *packaged], NONE: []}.get(name, [name])
    for each in names:
        try:
            profile = load(each)
        except UsageError as error:
            ignored.append(f"{error}; it is ignored")
            continue
        differences = profile.differences(machine)
        if not differences:
            return profile, ignored
        # That the package has profiles of other GPUs is no news.
        if name != AUTO or each not in packaged:
            ignored.append(
                f"profile {each} is ignored, as its {', '.join(differences)}; ds-tileoverlap tune measures again"
            )
    return None, ignored
