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


def return_rows_and_scalars(
    rows: torch.Tensor, scalars: torch.Tensor, plan: Plan, stage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`return_rows` and :func:`return_scalars` in one exchange: the scalars travel at the end of each row."""
    width, words = rows.shape[1], rows.element_size()
    # Scalars start, and rows end, at a multiple of 16 bytes.
    scalars_at = (width * words + 15) // 16 * 16 // words
    row_length = scalars_at + (4 * plan.top_k + 15) // 16 * 16 // words
    packed = rows.new_empty(plan.choice_rows.shape[0], row_length)
    packed_scalars = _scalars_in(packed, scalars_at, plan.top_k)
    sum_rows(rows, plan.choice_rows, packed[:, :width], (scalars, plan.choice_rows, packed_scalars))
    returned = all_to_all_rows(packed, plan.recv_splits, plan.send_splits, plan.peers, stage)
    of_routes = scalars.new_empty(plan.choice_slots.shape)
    returned_scalars = _scalars_in(returned, scalars_at, plan.top_k)
    sums = sum_rows(returned[:, :width], plan.token_slots, None, (returned_scalars, plan.choice_slots, of_routes))
    return sums, of_routes


def _scalars_in(packed: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return packed[:, start:].view(torch.float32)[:, :count]


def sum_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    sums: torch.Tensor | None = None,
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sum of the rows that each line of ``index`` names, in its order, accumulated in float32.

    Args:
        rows: [S, H].
        index: [N, k] int32; -1 names no row.
        sums: where to put the result; its rows may be strided.
        scalars: arguments of a :func:`gather_scalars` with as many rows, done in the same pass.

    Returns:
        [N, H] in the dtype of ``rows``. Rows ``[[1], [2], [4]]`` and index ``[[2, 0], [-1, 1]]`` give ``[[5], [2]]``.
    """
    num_sums, num_choices = index.shape
    width = rows.shape[1]
    sums = rows.new_empty(num_sums, width) if sums is None else sums
    if kernels.use_triton(rows):
        if sums.numel():
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            values, places, picked = scalars if scalars is not None else (rows, index, rows)
            _sum_rows_kernel[(num_sums,)](
                rows,
                index,
                sums,
                values,
                places,
                picked,
                width,
                rows.stride(0),
                sums.stride(0),
                values.stride(0),
                picked.stride(0),
                NUM_CHOICES=num_choices,
                SCALARS=0 if scalars is None else values.dim(),
                CHOICES=kernels.power_of_2(num_choices),
                BLOCK=min(kernels.power_of_2(width), 2048),
            )
        return sums
    if scalars is not None:
        gather_scalars(*scalars)
    total = torch.zeros(num_sums, width, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    for choice in index.unbind(1):
        named = choice >= 0
        total[named] += rows[choice[named]]
    return sums.copy_(total)


def gather_scalars(values: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None) -> torch.Tensor:
    """The value that each element of ``index`` names, 0 where it is -1.

    Args:
        values: [S] float32; or [S, k], of which column j is read by column j of the index; rows may be strided.
        index: [N, k] int32.
        picked: where to put the result; its rows may be strided.

    Returns:
        [N, k] float32.
    """
    num_columns = index.shape[1]
    by_column = values.dim() == 2
    picked = values.new_empty(index.shape) if picked is None else picked
    if kernels.use_triton(values):
        if picked.numel():
            grid = (triton.cdiv(picked.numel(), 1024),)
            _gather_scalars_kernel[grid](
                values,
                index,
                picked,
                picked.numel(),
                values.stride(0),
                picked.stride(0),
                COLUMNS=num_columns,
                BY_COLUMN=by_column,
                BLOCK=1024,
            )
        return picked
    if values.numel() == 0:
        return picked.zero_()
    rows = index.clamp(min=0).long()
    found = values.gather(0, rows) if by_column else values[rows]
    return picked.copy_(torch.where(index >= 0, found, 0))


@kernels.Kernel
@triton.jit(do_not_specialize=["num_elements"])
def _gather_scalars_kernel(
    values,
    index,
    picked,
    num_elements,
    values_stride,
    picked_stride,
    COLUMNS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_elements
    row = tl.load(index + element, inside, other=-1)
    place = row.to(tl.int64) * values_stride
    if BY_COLUMN:
        place += element % COLUMNS
    value = tl.load(values + place, row >= 0, other=0.0)
    tl.store(picked + (element // COLUMNS).to(tl.int64) * picked_stride + element % COLUMNS, value, inside)


@kernels.Kernel
@triton.jit
def _sum_rows_kernel(
    rows,
    index,
    sums,
    values,
    places,
    picked,
    width,
    rows_stride,
    sums_stride,
    values_stride,
    picked_stride,
    NUM_CHOICES: tl.constexpr,
    SCALARS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(NUM_CHOICES):
            row = tl.load(index + line * NUM_CHOICES + j).to(tl.int64)
            named = column < tl.where(row >= 0, width, 0)
            value = tl.load(rows + row * rows_stride + column, named, other=0.0)
            total += value.to(tl.float32)
        tl.store(sums + line * sums_stride + column, total.to(sums.dtype.element_ty), column < width)
    if SCALARS > 0:
        choice = tl.arange(0, CHOICES)
        place = tl.load(places + line * NUM_CHOICES + choice, choice < NUM_CHOICES, other=-1).to(tl.int64)
        # Of one value a row, or of a row of them the one in the choice's column.
        offset = place * values_stride + (choice if SCALARS == 2 else 0)
        value = tl.load(values + offset, place >= 0, other=0.0)
        tl.store(picked + line * picked_stride + choice, value, choice < NUM_CHOICES)
