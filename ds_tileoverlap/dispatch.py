"""Stage 3, dispatch: tokens travel to the ranks of their experts and are laid out as expert rows.

A token travels once to each rank that holds any of its experts; there it is expanded to one row a choice.
"""

from __future__ import annotations

import torch

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
