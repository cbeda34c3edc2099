"""What the Triton kernels of all stages share: when they run, and how large their tiles are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# Elements of the largest two-dimensional tile that an index kernel keeps in registers.
INDEX_TILE = 8192


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels run on this tensor; elsewhere (CPU, float64) their plain PyTorch twins do."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_rows(width: int, most: int = 256) -> int:
    """Rows of an index tile of ``width`` (a power of two) columns: a power of two, 1 to ``most``."""
    return max(1, min(most, INDEX_TILE // width))


def without_autocast(backward: Callable) -> Callable:
    """Keeps an ambient autocast out of a hand-written backward, whose dtypes are all chosen."""

    @functools.wraps(backward)
    def run(ctx, *grads):
        device = next(grad.device.type for grad in grads if grad is not None)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run
