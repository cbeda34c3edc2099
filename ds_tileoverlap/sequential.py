"""The ``sequential`` backend: one exchange after the other around grouped GEMMs, with hand-written gradients.

    forward    dispatch(x) -> expert_gemm -> combine(y)
    backward   dispatch(dY) -> expert_gemm: rows -> combine(dX, dw) -> expert_gemm: weights

Autograd functions save the Plan's tensors like any activation: under activation checkpointing they are freed and
recomputed with the rows they index, so a row and its place never come from two different routings.
Where any rank's experts run module by module, a hook on one of them being enough, all ranks exchange what autograd does
there: rows and scalars one by one, and no tokens again. Else a rank would wait for what no other sends.
The router's gradient is d(weight) = <dY W2, act>: expert outputs are neither kept nor sent again.
"""

from __future__ import annotations

from functools import partial

import torch

from . import expert_gemm
from .combine import return_rows, return_rows_and_scalars, return_scalars
from .dispatch import send_scalars, send_tokens
from .expert_gemm import (
    SlotGrads,
    down_grads,
    input_grads,
    mlp_backward_rows,
    mlp_by_expert,
    mlp_hidden,
    mlp_output,
)
from .expert_weights import ExpertWeights, are_stacked, expert_weights, split_slots
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts, state_of
from .stages import Stages


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: LocalExperts,
    plan: Plan,
    stages: Stages,
    recompute_dispatch: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: [T, H] tokens of this rank.
        weights: [T, k] float32 router weights, whose values came to the experts with the layout.
        recompute_dispatch: whether backward sends the tokens again instead of keeping expert rows; only where the
            experts of all ranks are of a known form.

    Returns:
        [T, H], in the dtype that the experts compute in.
    """
    # With this input the graph reaches every rank, whatever requires a gradient there: all take part in each exchange.
    anchor = x.new_empty(0, requires_grad=torch.is_grad_enabled())
    if experts.form is not None:
        dtype, parameters = compute_dtype(x), experts.parameters()
        inputs = (x, weights, anchor, experts, plan, dtype, stages, None, recompute_dispatch, *parameters)
        return apply_without_look(RoutedMLP, *inputs)
    with stages("dispatch"):
        rows, row_weights = _Dispatch.apply(x, weights, anchor, plan, stages)
    with stages("expert_gemm"):
        rows = experts.run(rows, row_weights, plan)
    with stages("combine"):
        return _ReturnRows.apply(rows, plan, "combine", stages)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a linear map of ``x`` runs in: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def apply_without_look(function: type[torch.autograd.Function], *inputs: object) -> torch.Tensor:
    """``function.apply`` without its look at every input for functorch wrappers: there are hundreds of parameters."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return super(torch.autograd.Function, function).apply(*inputs)


class RoutedMLP(torch.autograd.Function):
    """Dispatch, expert MLPs of a known form, and combine, as one node: its backward decides what runs when.

    The parameters follow the fixed inputs, slot by slot of the form. Every parameter that wants a gradient gets one.
    """

    FIXED_INPUTS = 9

    @staticmethod
    @without_autocast
    def forward(ctx, x, weights, anchor, experts, plan, dtype, stages, run, recompute_dispatch, *parameters):
        layout = experts.weight_layout(parameters, dtype)
        with stages("dispatch"):
            rows = send_tokens(x, plan, "dispatch").to(dtype)
        with stages("expert_gemm"):
            stacks = expert_weights(layout, parameters, dtype)
            hidden, pre_activations = mlp_hidden(rows, plan.row_weights, stacks, plan)
            outputs = mlp_output(hidden, plan.row_weights, stacks, plan)
        with stages("combine"):
            output = return_rows(outputs, plan, "combine")
        # Parameters claim to need gradients even where none are computed; the anchor knows.
        if anchor.requires_grad:
            rows = None if recompute_dispatch and not plan.runs_modules else rows
            RoutedMLP.keep(ctx, x, weights, rows, plan, pre_activations, experts, stages, parameters, dtype, backward)
        return output

    @staticmethod
    def keep(ctx, x, weights, rows, plan, pre_activations, experts, stages, parameters, dtype, run_backward):
        """Saves what backward needs, which is :func:`backward` or another function like it."""
        ctx.run_backward, ctx.plan, ctx.stages, ctx.dtype = run_backward, plan.without_tensors(), stages, dtype
        ctx.layout = experts.weight_layout(parameters, dtype)
        # Parameters are leaves that the graph keeps alive anyway; saving hundreds of them costs the host too much.
        ctx.parameters, ctx.state = parameters, experts.state()
        ctx.save_for_backward(x, weights, rows, *plan.tensors(), *pre_activations)

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        x, weights, rows, *saved = ctx.saved_tensors
        plan, pre_activations = ctx.plan.with_tensors(saved[: Plan.NUM_TENSORS]), saved[Plan.NUM_TENSORS :]
        parameters, form, stages = ctx.parameters, ctx.layout.form, ctx.stages
        if state_of(parameters) != ctx.state:
            raise RuntimeError(
                "an expert parameter that the backward pass needs was changed or moved after the forward"
            )
        if torch.is_grad_enabled():
            _check_differentiable(plan)
            return _differentiable_backward(ctx, grad, x, weights, plan, parameters)
        # Unless the graph is retained, what was saved is freed as soon as it has been used, not at the end.
        ctx.maybe_clear_saved_tensors()
        del saved, weights
        needs = split_slots(form, ctx.needs_input_grad[RoutedMLP.FIXED_INPUTS :])
        wanted = {slot for slot, need in zip(form.slots, needs) if any(need)}

        stacks = expert_weights(ctx.layout, parameters, ctx.dtype)
        grad_x, grad_weights, found = ctx.run_backward(grad, x, rows, plan, pre_activations, stacks, wanted, stages)
        if are_stacked(parameters):
            of_parameters = [found[slot] if slot in wanted else None for slot in form.slots]
        else:
            nothing, of_parameters = [None] * len(plan.expert_counts), []
            for slot in form.slots:
                of_parameters += found[slot].unbind() if slot in wanted else nothing
        return grad_x, grad_weights, *[None] * (RoutedMLP.FIXED_INPUTS - 2), *of_parameters


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor | None,
    plan: Plan,
    pre_activations: list[torch.Tensor],
    stacks: ExpertWeights,
    wanted: set[tuple[str, str]],
    stages: Stages,
) -> tuple[torch.Tensor, torch.Tensor, SlotGrads]:
    """The stages of backward.

    Args:
        grad: [T, H] gradient of the output.
        x: [T, H] tokens.
        rows: [R, H] expert rows; ``None`` to make them again, on all ranks whatever each of them wants.
        pre_activations: as the forward made them; emptied here.
        wanted: which parameters need gradients.

    Returns:
        The gradients of the tokens [T, H], of the router weights [T, k] float32, and of the wanted parameters.
    """
    form = stacks.layout.form
    with stages("combine backward"):
        grad = send_tokens(grad, plan, "combine backward")
    with stages("expert_gemm backward"):
        grad_rows, grad_row_weights, grad_pre_activations, hidden = mlp_backward_rows(
            grad, plan.row_weights, pre_activations, stacks, plan, keep_hidden=(form.down, "weight") in wanted
        )
    with stages("dispatch backward"):
        grad_x, grad_weights = _return_gradients(grad_rows.to(x.dtype), grad_row_weights, plan)
    del grad_rows
    weight_grads = partial(expert_gemm.weight_grads, plan=plan)
    with stages("expert_gemm weight gradients"):
        found = down_grads(grad, hidden, plan.row_weights, form, plan, wanted, weight_grads)
        compute_dtype = grad.dtype
        del grad, hidden
    if rows is None:
        with stages("dispatch again"):
            rows = send_tokens(x, plan, "dispatch again").to(compute_dtype)
    with stages("expert_gemm weight gradients"):
        found |= input_grads(grad_pre_activations, rows, stacks, plan, wanted, weight_grads)
    return grad_x, grad_weights, found


def _return_gradients(rows: torch.Tensor, scalars: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """As :class:`_Dispatch`'s backward returns them where any rank runs that, otherwise in one exchange."""
    stage = "dispatch backward"
    if plan.runs_modules:
        return return_rows(rows, plan, stage), return_scalars(scalars, plan, stage)
    return return_rows_and_scalars(rows, scalars, plan, stage)


def _check_differentiable(plan: Plan) -> None:
    if plan.runs_modules:
        raise RuntimeError(
            f"MoE layer '{plan.peers.layer}': backward with create_graph needs the experts of all ranks of the group "
            "to be of one kind, but some rank's experts have a hook or another form, and run module by module. "
            "Put the same hooks on all ranks."
        )


def _differentiable_backward(ctx, grad, x, weights, plan, parameters):
    """The backward of :class:`RoutedMLP` for ``create_graph``: through differentiable stages, computed again."""
    fixed = RoutedMLP.FIXED_INPUTS
    # Views, because inputs may depend on each other (weights on x, x on parameters): gradients must stop here.
    x, weights, *parameters = (tensor.view_as(tensor) for tensor in (x, weights, *parameters))
    anchor = x.new_empty(0, requires_grad=True)
    rows, row_weights = _Dispatch.apply(x, weights, anchor, plan, ctx.stages)
    outputs = mlp_by_expert(rows.to(grad.dtype), row_weights, ctx.layout.form, plan, parameters)
    output = _ReturnRows.apply(outputs, plan, "combine", ctx.stages)
    needs = (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[fixed:])
    inputs = [tensor for tensor, need in zip((x, weights, *parameters), needs) if need]
    grads = iter(torch.autograd.grad(output, inputs, grad, create_graph=True, materialize_grads=True))
    found = [next(grads) if need else None for need in needs]
    return *found[:2], *[None] * (fixed - 2), *found[2:]


class _PlanFunction(torch.autograd.Function):
    """A linear function of one tensor and a Plan; dispatch and combine are each other's transpose."""

    @staticmethod
    def setup(ctx, plan: Plan, stages: Stages | None = None) -> None:
        ctx.plan, ctx.stages = plan.without_tensors(), stages
        ctx.save_for_backward(*plan.tensors())

    @staticmethod
    def plan_of(ctx) -> Plan:
        return ctx.plan.with_tensors(ctx.saved_tensors)


class _Dispatch(_PlanFunction):
    @staticmethod
    def forward(ctx, x, weights, anchor, plan, stages):
        _Dispatch.setup(ctx, plan, stages)
        return send_tokens(x, plan, "dispatch"), plan.row_weights.clone()

    @staticmethod
    @without_autocast
    def backward(ctx, grad_rows, grad_row_weights):
        plan = _Dispatch.plan_of(ctx)
        with ctx.stages("dispatch backward"):
            grad_x = _ReturnRows.apply(grad_rows, plan, "dispatch backward", ctx.stages)
            return grad_x, _ReturnScalars.apply(grad_row_weights, plan), None, None, None


class _ReturnRows(_PlanFunction):
    @staticmethod
    def forward(ctx, rows, plan, stage, stages):
        _ReturnRows.setup(ctx, plan, stages)
        return return_rows(rows, plan, stage)

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        with ctx.stages("combine backward"):
            return _SendTokens.apply(grad, _ReturnRows.plan_of(ctx), ctx.stages), None, None, None


class _SendTokens(_PlanFunction):
    @staticmethod
    def forward(ctx, x, plan, stages):
        _SendTokens.setup(ctx, plan, stages)
        return send_tokens(x, plan, "combine backward")

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        return _ReturnRows.apply(grad, _SendTokens.plan_of(ctx), "double backward", ctx.stages), None, None


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
