"""The two kinds of workers of a fused kernel. Times are microseconds, arrays are float64."""

from __future__ import annotations

import heapq

import numpy as np


def in_order(ready: np.ndarray, durations: np.ndarray) -> np.ndarray:
    """When each piece ends, of one worker that does them in their order, each not before it is ready.

    Pieces ready at ``[0, 5, 1]`` that take 2 each end at ``[2, 7, 9]``.
    """
    before = np.cumsum(durations) - durations
    return np.maximum.accumulate(ready - before) + before + durations


def claimed(ready: np.ndarray, duration: float, num_workers: int) -> np.ndarray:
    """When each piece ends, of several workers: whoever is free claims the next piece and waits until it is ready.

    Pieces ready at ``[0, 0, 5, 0]`` that take 2 each end at ``[2, 2, 7, 4]`` with two workers.
    """
    free, ends = [0.0] * num_workers, np.empty(len(ready))
    for i, at in enumerate(ready.tolist()):
        ends[i] = end = max(free[0], at) + duration
        heapq.heapreplace(free, end)
    return ends


def claimed_at_once(num_pieces: int, duration: float, num_workers: int) -> float:
    """When the last piece ends if all are ready at 0: three pieces of 2 on two workers end at 4."""
    return -(-num_pieces // num_workers) * duration
