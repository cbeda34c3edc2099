"""What the package says: one line at start, one for each reason why something runs otherwise than asked."""

from __future__ import annotations

from torch import distributed as dist


def say(message: str, every_rank: bool = False) -> None:
    """Prints one line, on rank 0 unless each rank has its own. DeepSpeed's logger would hide what is no warning."""
    if every_rank or not dist.is_initialized() or dist.get_rank() == 0:
        print(f"tile_overlap: {message}", flush=True)
