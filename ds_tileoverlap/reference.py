"""The ``reference`` backend: the same stages in plain PyTorch, differentiated by autograd, experts called one by one.

Slow and easy to check; what the other backends are tested against. It runs anywhere, also on CPU with gloo.
"""

from __future__ import annotations

import torch

from .dispatch import by_row
from .exchange import all_to_all_rows
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts
from .stages import Stages


def routed_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: LocalExperts, plan: Plan, stages: Stages
) -> torch.Tensor:
    """The weighted sum of each token's experts: tokens [T, H], router weights [T, k] -> [T, H]."""
    with stages("dispatch"):
        rows, row_weights = dispatch(x, weights, plan)
    with stages("expert_gemm"):
        rows = experts.run(rows, row_weights, plan)
    with stages("combine"):
        return combine(rows, plan)


def dispatch(x: torch.Tensor, weights: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and router weights to the experts: [T, H], [T, k] -> rows [R, H], row weights [R] float32."""
    received = _to_experts(x[plan.sent_tokens], plan, "dispatch")
    received_weights = _to_experts(weights[plan.sent_tokens], plan, "dispatch")
    return received[plan.row_sources], by_row(received_weights, plan)


def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Expert outputs to the owners of their tokens, summed: [R, H] -> [T, H]."""
    partial = _sum(rows, plan.choice_rows)
    returned = _AllToAll.apply(partial, _anchor(partial), plan.recv_splits, plan.send_splits, plan.peers, "combine")
    return _sum(returned, plan.token_slots)


def _sum(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The sum of the rows that each line of ``index`` names; index -1 reads the zero row at the end."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    wide = torch.promote_types(rows.dtype, torch.float32)
    return padded[index.long()].to(wide).sum(1).to(rows.dtype)


def _to_experts(rows: torch.Tensor, plan: Plan, stage: str) -> torch.Tensor:
    return _AllToAll.apply(rows, _anchor(rows), plan.send_splits, plan.recv_splits, plan.peers, stage)


def _anchor(rows: torch.Tensor) -> torch.Tensor:
    """An input that always requires a gradient, so that every rank takes part in the exchanges of backward."""
    return rows.new_empty(0, requires_grad=torch.is_grad_enabled())


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, anchor, send_splits, recv_splits, peers, stage):
        ctx.splits, ctx.peers, ctx.stage = (send_splits, recv_splits), peers, stage
        # A view, never the input itself: with one rank nothing moves.
        return all_to_all_rows(rows.contiguous(), send_splits, recv_splits, peers, stage).view(-1, rows.shape[1])

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        send_splits, recv_splits = ctx.splits
        back = _AllToAll.apply(grad, _anchor(grad), recv_splits, send_splits, ctx.peers, f"{ctx.stage} backward")
        return back, None, None, None, None, None
