"""The ``sequential`` backend: one exchange after the other around grouped GEMMs, with hand-written gradients.

Dispatch and combine are linear and each other's transpose, so each one's backward is the other's forward:

    forward:   dispatch(x, weights) -> expert_gemm -> combine
    backward:  dispatch(dY) -> expert_gemm backward -> combine(dX), one scalar a row for the router

Autograd functions save the Plan's tensors like any activation: under activation checkpointing they are freed and
recomputed with the rows they index, so a row and its place never come from two different routings.
"""

from __future__ import annotations

import torch

from .combine import return_rows, return_scalars
from .dispatch import send_scalars, send_tokens
from .expert_gemm import ExpertMLP, run_modules
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts


def dispatch(x: torch.Tensor, weights: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and router weights to the experts: [T, H], [T, k] -> rows [R, H], row weights [R] float32."""
    # With this input the graph reaches every rank, whatever requires a gradient there: all take part in each exchange.
    anchor = x.new_empty(0, requires_grad=torch.is_grad_enabled())
    return _Dispatch.apply(x, weights, anchor, plan)


def run_experts(rows: torch.Tensor, row_weights: torch.Tensor, experts: LocalExperts, plan: Plan) -> torch.Tensor:
    """Expert outputs scaled by their row's weight: [R, H] -> [R, H]."""
    if experts.form is None:
        return run_modules(experts.modules, rows, row_weights, plan)
    layout = experts.weight_layout(rows.dtype)
    return ExpertMLP.apply(rows, row_weights, layout, plan, *experts.parameters())


def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Expert outputs to the owners of their tokens, summed: [R, H] -> [T, H]."""
    return _ReturnRows.apply(rows, plan, "combine")


class _PlanFunction(torch.autograd.Function):
    """A function of one tensor and a Plan."""

    @staticmethod
    def setup(ctx, plan: Plan) -> None:
        ctx.plan = plan.without_tensors()
        ctx.save_for_backward(*plan.tensors())

    @staticmethod
    def plan_of(ctx) -> Plan:
        return ctx.plan.with_tensors(ctx.saved_tensors)


class _Dispatch(_PlanFunction):
    @staticmethod
    def forward(ctx, x, weights, anchor, plan):
        _Dispatch.setup(ctx, plan)
        # The weights' values came with the layout; this links them to the router.
        return send_tokens(x, plan, "dispatch"), plan.row_weights.clone()

    @staticmethod
    @without_autocast
    def backward(ctx, grad_rows, grad_row_weights):
        plan, stage = _Dispatch.plan_of(ctx), "dispatch backward"
        if not torch.is_grad_enabled():
            return return_rows(grad_rows, plan, stage), return_scalars(grad_row_weights, plan, stage), None, None
        return (
            _ReturnRows.apply(grad_rows, plan, stage),
            _ReturnScalars.apply(grad_row_weights, plan),
            None,
            None,
        )


class _ReturnRows(_PlanFunction):
    @staticmethod
    def forward(ctx, rows, plan, stage):
        _ReturnRows.setup(ctx, plan)
        return return_rows(rows, plan, stage)

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        plan = _ReturnRows.plan_of(ctx)
        if not torch.is_grad_enabled():
            return send_tokens(grad, plan, "combine backward"), None, None
        return _SendTokens.apply(grad, plan), None, None


class _SendTokens(_PlanFunction):
    @staticmethod
    def forward(ctx, x, plan):
        _SendTokens.setup(ctx, plan)
        return send_tokens(x, plan, "combine backward")

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        return _ReturnRows.apply(grad, _SendTokens.plan_of(ctx), "double backward"), None


class _ReturnScalars(_PlanFunction):
    @staticmethod
    def forward(ctx, scalars, plan):
        _ReturnScalars.setup(ctx, plan)
        return return_scalars(scalars, plan, "dispatch backward")

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        return _SendScalars.apply(grad, _ReturnScalars.plan_of(ctx)), None


class _SendScalars(_PlanFunction):
    @staticmethod
    def forward(ctx, scalars, plan):
        _SendScalars.setup(ctx, plan)
        return send_scalars(scalars, plan, "double backward")

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        return _ReturnScalars.apply(grad, _SendScalars.plan_of(ctx)), None
