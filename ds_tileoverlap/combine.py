"""Stage 5, combine: expert rows return to the owners of their tokens and are summed.

Rows of one token are summed on the experts' rank first, so one row a (token, rank) travels. Both sums run in float32
and in a fixed order, without atomics: results are the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import kernels
from .exchange import all_to_all_rows
from .layout import Plan


def return_rows(rows: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    """Sums and returns expert rows: [R, H] rows of this rank's experts -> [T, H] of its tokens."""
    partial = sum_rows(rows, plan.choice_rows)
    returned = all_to_all_rows(partial, plan.recv_splits, plan.send_splits, plan.peers, stage)
    return sum_rows(returned, plan.token_slots)


def return_scalars(scalars: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    """Returns one float32 a row: [R] of this rank's expert rows -> [T, k] of its routes, 0 for a dropped route."""
    partial = gather_scalars(scalars, plan.choice_rows)
    returned = all_to_all_rows(partial, plan.recv_splits, plan.send_splits, plan.peers, stage)
    return gather_scalars(returned, plan.choice_slots)


def sum_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The sum of the rows that each line of ``index`` names, in its order, accumulated in float32.

    Args:
        rows: [S, H].
        index: [N, k] int32; -1 names no row.

    Returns:
        [N, H] in the dtype of ``rows``. Rows ``[[1], [2], [4]]`` and index ``[[2, 0], [-1, 1]]`` give ``[[5], [2]]``.
    """
    num_sums, num_choices = index.shape
    width = rows.shape[1]
    if kernels.use_triton(rows):
        sums = rows.new_empty(num_sums, width)
        if sums.numel():
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            _sum_rows_kernel[(num_sums,)](
                rows,
                index,
                sums,
                width,
                rows.stride(0),
                NUM_CHOICES=num_choices,
                BLOCK=min(kernels.power_of_2(width), 2048),
            )
        return sums
    total = torch.zeros(num_sums, width, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    for choice in index.unbind(1):
        named = choice >= 0
        total[named] += rows[choice[named]]
    return total.to(rows.dtype)


def gather_scalars(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The value that each element of ``index`` names, 0 where it is -1.

    Args:
        values: [S] float32; or [S, k], of which column j is read by column j of the index.
        index: [N, k] int32.

    Returns:
        [N, k] float32.
    """
    num_rows, num_columns = index.shape
    by_column = values.dim() == 2
    if kernels.use_triton(values):
        picked = values.new_empty(index.shape)
        if picked.numel():
            grid = (triton.cdiv(picked.numel(), 1024),)
            _gather_scalars_kernel[grid](
                values, index, picked, picked.numel(), COLUMNS=num_columns if by_column else 0, BLOCK=1024
            )
        return picked
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    rows = index.clamp(min=0).long()
    found = values.gather(0, rows) if by_column else values[rows]
    return torch.where(index >= 0, found, 0)


@triton.jit
def _gather_scalars_kernel(values, index, picked, num_elements, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + element, element < num_elements, other=-1)
    place = row
    if COLUMNS > 0:
        place = row * COLUMNS + element % COLUMNS
    tl.store(picked + element, tl.load(values + place, row >= 0, other=0.0), element < num_elements)


@triton.jit
def _sum_rows_kernel(rows, index, sums, width, rows_stride, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(NUM_CHOICES):
            row = tl.load(index + line * NUM_CHOICES + j).to(tl.int64)
            named = column < tl.where(row >= 0, width, 0)
            value = tl.load(rows + row * rows_stride + column, named, other=0.0)
            total += value.to(tl.float32)
        tl.store(sums + line * width + column, total.to(sums.dtype.element_ty), column < width)
