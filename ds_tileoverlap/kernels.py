"""What the Triton kernels of all stages share: when they run, and how large their tiles are."""

from __future__ import annotations

import functools
import inspect
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


class Kernel:
    """A ``@triton.jit`` function whose later launches skip what the first one found out.

    Triton binds and inspects every argument of every launch, which takes longer than most of these kernels. It compiles
    for a tensor's dtype and alignment, and for integers that are one, a multiple of 16, or long; what it compiled is
    launched directly, as Triton's tutorials do it. Constants are the last parameters of such a function, which is
    launched like any other: ``kernel[grid](*tensors, NAME=constant)``.
    """

    def __init__(self, function):
        self._function, self._compiled = function, {}
        self._names = list(inspect.signature(function.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        first = arguments[0]
        # All tensors of a launch lie on one device, the first argument among them.
        key, values = [first.get_device(), *constants.values()], []
        for value in arguments:
            if isinstance(value, torch.Tensor):
                key.append(value.dtype)
                # Addresses, because Triton asks the driver about every tensor.
                value = value.data_ptr()
                key.append(value % 16 == 0)
            elif type(value) is int:
                key += value == 1, value % 16 == 0, value.bit_length() > 31
            else:
                key.append(type(value))
            values.append(value)
        found = self._compiled.get(key := tuple(key))
        if found is None:
            compiled = self._function[grid](*arguments, **constants)
            # Triton's interpreter compiles nothing.
            kernel = compiled if hasattr(compiled, "function") else None
            self._compiled[key] = kernel, [constants[name] for name in self._names if name in constants]
            return
        compiled, of_kernel = found
        if compiled is None:
            self._function[grid](*arguments, **constants)
        else:
            compiled[(*grid, 1, 1)[:3]](*values, *of_kernel, stream=raw_stream(first))


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
