"""What the package says: one line at start, one for each reason why something runs otherwise than asked."""

from __future__ import annotations

import os

from torch import distributed as dist


def say(message: str, every_rank: bool = False) -> None:
    """Prints one line, on rank 0 unless each rank has its own. DeepSpeed's logger would hide what is no warning."""
    if every_rank or _rank() == 0:
        print(f"tile_overlap: {message}", flush=True)


def _rank() -> int:
    """As launchers give it where the process group does not exist yet, which ``deepspeed.initialize`` may make."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
