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


def raw_stream(tensor: torch.Tensor) -> int:
    """The handle of the current stream, for the compiled operator; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_rows(width: int, most: int = 256) -> int:
    """Rows of an index tile of ``width`` (a power of two) columns: a power of two, 1 to ``most``."""
    return max(1, min(most, INDEX_TILE // width))


def without_autocast(function: Callable) -> Callable:
    """Keeps an ambient autocast out of a method of an autograd function, where every dtype is chosen by hand."""

    @functools.wraps(function)
    def run(ctx, *inputs):
        device = next(value.device.type for value in inputs if isinstance(value, torch.Tensor))
        if not torch.is_autocast_enabled(device):
            return function(ctx, *inputs)
        with torch.autocast(device, enabled=False):
            return function(ctx, *inputs)

    return run
