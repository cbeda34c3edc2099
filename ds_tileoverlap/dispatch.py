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
    sent = x.index_select(0, plan.sent_tokens)
    received = all_to_all_rows(sent, plan.send_splits, plan.recv_splits, plan.peers, stage)
    return received.index_select(0, plan.row_sources)


def send_scalars(scalars: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    """Exchanges one float32 a route: [T, k] of this rank's tokens -> [R] of its expert rows."""
    sent = scalars.index_select(0, plan.sent_tokens)
    received = all_to_all_rows(sent, plan.send_splits, plan.recv_splits, plan.peers, stage)
    return by_row(received, plan)


def by_row(received: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The values [U, k] that came with received rows, in the order of the expert rows [R]; differentiable."""
    ours = plan.choice_rows >= 0
    rows = received.new_zeros(plan.row_sources.numel())
    return rows.index_put((plan.choice_rows[ours].long(),), received[ours])


def expand_rows(arrived: torch.Tensor, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Expert rows [R, H] of the rows that came from other ranks [U - own, H] and of this rank's own tokens [T, H].

    With received rows ``a b`` of which the second is this rank's token ``t``, so that only ``a`` has arrived, and row
    sources ``[1, 0, 1]``: ``[t, a, t]``.
    """
    rank = plan.peers.rank
    own_first, own_sent = sum(plan.recv_splits[:rank]), sum(plan.send_splits[:rank])
    own = plan.sent_tokens[own_sent : own_sent + plan.send_splits[rank]]
    x = x.to(arrived.dtype)
    if not kernels.use_triton(arrived):
        received = torch.cat([arrived[:own_first], x[own.long()], arrived[own_first:]])
        return received.index_select(0, plan.row_sources)
    rows = arrived.new_empty(plan.row_sources.numel(), x.shape[1])
    if rows.numel():
        x = x.contiguous()
        _expand_rows_kernel[(rows.shape[0],)](
            arrived,
            x,
            own,
            plan.row_sources,
            rows,
            own_first,
            own_first + own.numel(),
            rows.shape[1],
            BLOCK=min(kernels.power_of_2(rows.shape[1]), 2048),
        )
    return rows


@triton.jit(do_not_specialize=["own_first", "own_end"])
def _expand_rows_kernel(arrived, x, own, sources, rows, own_first, own_end, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + row)
    # 1 where the row never left its rank, else 0; loads of the other kind have empty masks.
    is_own = tl.where(source >= own_first, 1, 0) * tl.where(source < own_end, 1, 0)
    one = tl.arange(0, 1)
    token = tl.sum(tl.load(own + is_own * (source - own_first) + one, one < is_own, other=0), 0).to(tl.int64)
    place = tl.where(source < own_first, source, source - (own_end - own_first)).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mine = tl.load(x + token * width + column, column < width * is_own, other=0.0)
        theirs = tl.load(arrived + place * width + column, column < width * (1 - is_own), other=0.0)
        tl.store(rows + row * width + column, tl.where(is_own > 0, mine, theirs), column < width)
