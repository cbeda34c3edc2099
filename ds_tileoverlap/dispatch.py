"""Stage 3, dispatch: tokens travel to the ranks of their experts and are laid out as expert rows.

A token travels once to each rank that holds any of its experts; there it is expanded to one row a choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import kernels
from .exchange import all_to_all_rows
from .layout import Plan


def send_tokens(x: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    """Exchanges tokens and expands them: [T, H] of this rank -> [R, H] rows of its experts, grouped by expert."""
    sent = gather_rows(x, plan.sent_tokens)
    received = all_to_all_rows(sent, plan.send_splits, plan.recv_splits, plan.peers, stage)
    return gather_rows(received, plan.row_choices, plan.top_k)


def send_scalars(scalars: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    """Exchanges one float32 a route: [T, k] of this rank's tokens -> [R] of its expert rows."""
    sent = gather_rows(scalars, plan.sent_tokens)
    received = all_to_all_rows(sent, plan.send_splits, plan.recv_splits, plan.peers, stage)
    return received.view(-1)[plan.row_choices]


def gather_rows(source: torch.Tensor, index: torch.Tensor, divisor: int = 1) -> torch.Tensor:
    """Row ``index // divisor`` of ``source`` for each index.

    Args:
        source: [S, H], last dimension contiguous.
        index: [N] int32.

    Returns:
        [N, H], contiguous.
    """
    num_rows, width = index.numel(), source.shape[1]
    rows = source.new_empty(num_rows, width)
    if kernels.use_triton(source):
        if rows.numel():
            source = source if source.stride(1) == 1 else source.contiguous()
            _gather_rows_kernel[(num_rows,)](
                source, index, rows, width, source.stride(0), divisor, BLOCK=min(kernels.power_of_2(width), 4096)
            )
        return rows
    return torch.index_select(source, 0, index // divisor, out=rows)


@triton.jit
def _gather_rows_kernel(source, index, rows, width, source_stride, divisor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    from_row = (tl.load(index + row) // divisor).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + from_row * source_stride + column, column < width)
        tl.store(rows + row * width + column, value, column < width)
