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


def place_own_rows(x: torch.Tensor, plan: Plan, rows: torch.Tensor) -> None:
    """Writes this rank's own tokens [T, H] to their places among its expert rows [R, H], and nothing else.

    With received rows ``a b`` of which the second is this rank's token ``t``, and choice rows ``[[1, -1], [2, 0]]``:
    rows 0 and 2 become ``t``.
    """
    first_sent, first_received, own_rows = plan.tally.own_sent, plan.tally.own_received, plan.tally.own_rows
    if not kernels.use_triton(rows):
        places = plan.choice_rows[first_received : first_received + own_rows]
        own, choices = (places >= 0).nonzero(as_tuple=True)
        rows[places[own, choices].long()] = x[plan.sent_tokens[first_sent : first_sent + own_rows][own].long()]
    elif own_rows:
        _place_own_rows_kernel[(own_rows,)](
            x,
            plan.sent_tokens,
            plan.choice_rows,
            rows,
            first_sent,
            first_received,
            plan.choice_rows.shape[1],
            x.shape[1],
            BLOCK=min(kernels.power_of_2(x.shape[1]), 2048),
        )


@kernels.Kernel
@triton.jit(do_not_specialize=["first_sent", "first_received"])
def _place_own_rows_kernel(
    x, tokens, places, rows, first_sent, first_received, num_choices, width, BLOCK: tl.constexpr
):
    own = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + first_sent + own).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * width + column, column < width)
        for choice in range(num_choices):
            row = tl.load(places + (first_received + own) * num_choices + choice).to(tl.int64)
            tl.store(rows + row * width + column, value, column < tl.where(row >= 0, width, 0))
