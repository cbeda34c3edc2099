"""What all ranks of a job tell each other on the host, so that none goes on, or waits, where another one has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed import comm as dist


def of_every_rank(value: Any) -> list[Any]:
    """The value of each rank, in their order; a small collective of the whole job."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(action: Callable[[], None], what: str) -> None:
    """Runs ``action`` on rank 0 alone, while the others wait.

    Raises:
        RuntimeError: it failed; on every rank, with ``what`` was to be done and why it was not.
    """
    failure = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # the other ranks wait to hear of it, whatever it is
            failure = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise RuntimeError(f"rank 0 could not {what}: {failure[0]}")
