"""The element-wise middle of an expert MLP: ``hidden = act(gate) * up`` (or ``act(up)``), scaled by the router weight.

Some families clamp gate and up and shift up: numbers of the :class:`Activation`, which by default do nothing.
Scaling the hidden row instead of the expert's output gives the same sum, lets rows be added up without weights on their
way home, and gives the router's gradient, <d_hidden, hidden>, without keeping the expert's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import kernels

# Activations that the kernels know, in plain PyTorch.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Activation:
    """``act(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``; without a gate ``act(min(up, limit))``.

    Attributes:
        name: a name in :data:`ACTIVATIONS`, of a function f; ``act(x)`` is ``f(alpha * x) / alpha``.
        alpha: with silu, the gain inside ``x * sigmoid(alpha * x)``.
        limit: where gate is clamped from above, and up on both sides.
        shift: added to up.
    """

    name: str
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def __call__(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        """The hidden rows in plain differentiable PyTorch: [R, I], or ``None``, and [R, I] -> [R, I]."""
        inner = up if gate is None else gate
        # Without a limit nothing is clamped: that would cost a NaN its gradient.
        if self.limit < math.inf:
            inner, up = inner.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        value = ACTIVATIONS[self.name](self.alpha * inner) / self.alpha
        return value if gate is None else value * (up + self.shift)

    def constants(self) -> dict[str, str | float]:
        """What the kernels are compiled for."""
        return {"ACT": self.name, "ALPHA": self.alpha, "LIMIT": self.limit, "SHIFT": self.shift}


SILU = Activation("silu")


def weighted_hidden(
    gate: torch.Tensor | None, up: torch.Tensor, row_weights: torch.Tensor, act: Activation
) -> torch.Tensor:
    """The hidden rows of ``act``, each scaled by its row weight; float32 inside.

    Args:
        gate, up: [R, I] pre-activations, rows may be strided; no gate is ``None``.
        row_weights: [R] float32.
        act: what the experts compute.

    Returns:
        [R, I], contiguous, dtype of ``up``.
    """
    num_rows, width = up.shape
    hidden = up.new_empty(num_rows, width)
    if kernels.use_triton(up):
        if hidden.numel():
            grid, block = _launch(num_rows, width)
            _weighted_hidden_kernel[grid](
                gate if gate is not None else up,
                up,
                row_weights,
                hidden,
                num_rows,
                width,
                up.stride(0),
                **act.constants(),
                GATED=gate is not None,
                **block,
            )
        return hidden
    return hidden.copy_(row_weights.unsqueeze(1) * _hidden(gate, up, act))


def hidden_backward(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    row_weights: torch.Tensor,
    act: Activation,
    grad_weighted: torch.Tensor,
    grad_gate: torch.Tensor | None,
    grad_up: torch.Tensor,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of :func:`weighted_hidden`, into given tensors.

    Args:
        gate, up, row_weights, act: as in the forward.
        grad_weighted: [R, I] gradient of the weighted hidden rows.
        grad_gate, grad_up: [R, I] outputs, rows may be strided.
        hidden: [R, I] output or ``None``: the weighted hidden rows again, for the down projection's weight gradient.

    Returns:
        [R] float32, the gradient of ``row_weights``.
    """
    num_rows, width = up.shape
    grad_row_weights = torch.empty_like(row_weights)
    if kernels.use_triton(up):
        if up.numel():
            grid, block = _launch(num_rows, width)
            _hidden_backward_kernel[grid](
                gate if gate is not None else up,
                up,
                row_weights,
                grad_weighted,
                grad_gate if gate is not None else grad_up,
                grad_up,
                hidden if hidden is not None else grad_weighted,
                grad_row_weights,
                num_rows,
                width,
                up.stride(0),
                grad_up.stride(0),
                **act.constants(),
                GATED=gate is not None,
                KEEP_HIDDEN=hidden is not None,
                **block,
            )
        return grad_row_weights
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (gate, up) if x is not None]
        value = _hidden(inputs[0] if gate is not None else None, inputs[-1], act)
    grad = grad_weighted.to(value.dtype)
    grads = torch.autograd.grad(value, inputs, grad * row_weights.unsqueeze(1))
    for target, grad_input in zip((grad_gate, grad_up) if gate is not None else (grad_up,), grads):
        target.copy_(grad_input)
    if hidden is not None:
        hidden.copy_(value.detach() * row_weights.unsqueeze(1))
    return grad_row_weights.copy_((grad * value.detach()).sum(1))


def _hidden(gate: torch.Tensor | None, up: torch.Tensor, act: Activation) -> torch.Tensor:
    """The unweighted hidden rows, in float32 or better."""
    dtype = torch.promote_types(up.dtype, torch.float32)
    return act(None if gate is None else gate.to(dtype), up.to(dtype))


def _launch(num_rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    columns = min(kernels.power_of_2(width), 1024)
    rows = max(1, 2048 // columns)
    return (triton.cdiv(num_rows, rows),), {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def _function(x, ACT: tl.constexpr):
    """f and its derivative."""
    if ACT == "silu":
        sigmoid = tl.sigmoid(x)
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    elif ACT == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 0.134145 * x * x)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope
    else:
        tl.static_assert(ACT == "relu")
        # Written so that NaN passes through, as it does in torch.
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def _activate(x, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of x clamped from above, and its derivative."""
    beyond = x > LIMIT
    value, slope = _function(ALPHA * tl.where(beyond, LIMIT, x), ACT)
    return value / ALPHA, tl.where(beyond, 0.0, slope)


@triton.jit
def _factor(up, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """What the activation is multiplied by, and its derivative."""
    clamped = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return clamped + SHIFT, tl.where(tl.abs(up) > LIMIT, 0.0, 1.0)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_rows"])
def _weighted_hidden_kernel(
    gate,
    up,
    row_weights,
    hidden,
    num_rows,
    width,
    stride,
    ACT: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(row_weights + row, row < num_rows, other=0.0)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * stride + column[None, :]
        u = tl.load(up + place, inside, other=0.0).to(tl.float32)
        if GATED:
            g = tl.load(gate + place, inside, other=0.0).to(tl.float32)
            value = _activate(g, ACT, ALPHA, LIMIT)[0] * _factor(u, LIMIT, SHIFT)[0]
        else:
            value, _ = _activate(u, ACT, ALPHA, LIMIT)
        value *= weight[:, None]
        tl.store(hidden + row[:, None] * width + column[None, :], value.to(hidden.dtype.element_ty), inside)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_rows"])
def _hidden_backward_kernel(
    gate,
    up,
    row_weights,
    grad_weighted,
    grad_gate,
    grad_up,
    hidden,
    grad_row_weights,
    num_rows,
    width,
    stride,
    grad_stride,
    ACT: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    GATED: tl.constexpr,
    KEEP_HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(row_weights + row, row < num_rows, other=0.0)[:, None]
    grad_weight = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * stride + column[None, :]
        grad_place = row[:, None] * grad_stride + column[None, :]
        packed = row[:, None] * width + column[None, :]
        grad = tl.load(grad_weighted + packed, inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, inside, other=0.0).to(tl.float32)
        if GATED:
            g = tl.load(gate + place, inside, other=0.0).to(tl.float32)
            value, slope = _activate(g, ACT, ALPHA, LIMIT)
            factor, factor_slope = _factor(u, LIMIT, SHIFT)
            to_gate, to_up = grad * weight * factor * slope, grad * weight * value * factor_slope
            tl.store(grad_gate + grad_place, to_gate.to(grad_gate.dtype.element_ty), inside)
            tl.store(grad_up + grad_place, to_up.to(grad_up.dtype.element_ty), inside)
            value *= factor
        else:
            value, slope = _activate(u, ACT, ALPHA, LIMIT)
            tl.store(grad_up + grad_place, (grad * weight * slope).to(grad_up.dtype.element_ty), inside)
        grad_weight += tl.sum(grad * value, 1)
        if KEEP_HIDDEN:
            tl.store(hidden + packed, (value * weight).to(hidden.dtype.element_ty), inside)
    tl.store(grad_row_weights + row, grad_weight, row < num_rows)
