"""Ranks on this machine."""

from __future__ import annotations

import sys


def command_of(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module as so many ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, "-m", module, *arguments]
