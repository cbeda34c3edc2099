"""The ``overlap`` backend: what travels does so under the GEMM that needs it, or that makes it.

    forward    { dispatch(x) => expert_gemm: hidden } -> { expert_gemm: output => return } -> combine: sum
    backward   { dispatch(dY) => expert_gemm: d hidden } -> { expert_gemm: d rows => return } -> weights -> combine: sum

Each pair in braces is one kernel: two spare warps of every CTA of the GEMM, the couriers, carry rows while the others
multiply. Rows for this rank's own tokens are read where they lie, and computed while the others are on their way.
Whether the backend can run is decided by the whole group: what a machine cannot do once, when the group is first used;
what a layer cannot do in every forward, with a word in the exchanged counts.
"""

from __future__ import annotations

from functools import partial

import torch

from . import sequential
from .activation import weighted_hidden
from .config import TileOverlapConfig
from .dispatch import expand_rows
from .expert_form import ExpertForm
from .expert_gemm import SlotGrads, activation_backward, add_expert_bias_, down_grads, input_grads
from .expert_weights import ExpertWeights, expert_weights
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts
from .overlap_group import Group
from .overlap_stages import Operand, Run, project_arriving, return_tiles, return_while_computed, scalar_return
from .stages import Stages

# A courier finds the rows of a sum in the lanes of its warp.
MAX_TOP_K = 32


def refusal(experts: LocalExperts, dtype: torch.dtype, num_experts: int, top_k: int, op) -> str | None:
    """Why this rank cannot overlap this layer now; ``None`` where it can."""
    if experts.form is None:
        return "its experts are of a form that only runs as it is, module by module"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {dtype}, not in bfloat16 or float16"
    if (experts.form.down, "bias") in experts.form.slots:
        return "its experts' down projection has a bias"
    hidden_size, width = experts.down_shape()
    if hidden_size % 8 or width % 8:
        return f"its sizes {hidden_size} and {width} are not multiples of 8"
    if not experts.are_aligned(dtype):
        return "its weights do not begin at multiples of 16 bytes"
    if top_k > MAX_TOP_K:
        return f"a token goes to {top_k} experts, more than {MAX_TOP_K}"
    if num_experts > op.MAX_EXPERTS:
        return f"it has {num_experts} experts, more than {op.MAX_EXPERTS}"
    return None


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: LocalExperts,
    plan: Plan,
    stages: Stages,
    group: Group,
    config: TileOverlapConfig,
) -> torch.Tensor:
    """As :func:`sequential.routed_experts`, for a Plan whose ranks all can overlap."""
    anchor = x.new_empty(0, requires_grad=torch.is_grad_enabled())
    dtype, parameters = sequential.compute_dtype(x), experts.parameters()
    layout = experts.weight_layout(parameters, dtype)
    run = Run(group, config, experts.maps)
    return sequential.apply_without_look(
        _OverlappedMLP, x, weights, anchor, layout, plan, dtype, stages, run, *parameters
    )


class _OverlappedMLP(sequential.RoutedMLP):
    """:class:`sequential.RoutedMLP` with other stages. It keeps the rows that arrived, not what they expand to."""

    @staticmethod
    @without_autocast
    def forward(ctx, x, weights, anchor, layout, plan, dtype, stages, run, *parameters):
        tokens = x.detach().to(dtype).contiguous()
        stacks = expert_weights(layout, parameters, dtype)
        form, needs = layout.form, any(ctx.needs_input_grad)
        with stages("expert_gemm"):
            inputs = [Operand(f"input {i}", stack, transposed=False) for i, stack in enumerate(stacks.inputs)]
            pre_activations, kept = project_arriving(tokens, inputs, plan, run, keep=needs)
            gate, up = stacks.split(pre_activations, 1)
            for name, part in ((form.gate, gate), (form.up, up)):
                if name in stacks.biases:
                    add_expert_bias_(part, stacks.biases[name], plan)
            hidden = weighted_hidden(gate, up, plan.row_weights, form.act)
        down = Operand("down", stacks.down, transposed=False)
        tiles = return_tiles(down.width, dtype, plan, run)
        output = return_while_computed([(hidden, down)], tiles, plan, run, stages)
        sequential.RoutedMLP.keep(
            ctx, x, weights, kept, plan, pre_activations, layout, stages, parameters, _backward_of(run)
        )
        return output


def _backward_of(run: Run):
    """The backward that the config asks for, as :func:`sequential.backward` from the rows that arrived."""

    def expanded(grad, x, kept, plan, pre_activations, stacks, wanted, stages):
        rows = expand_rows(kept, x, plan) if input_weights(stacks.layout.form) & wanted else None
        return sequential.backward(grad, x, rows, plan, pre_activations, stacks, wanted, stages)

    return partial(backward, run=run) if run.overlaps_backward else expanded


def input_weights(form: ExpertForm) -> set[tuple[str, str]]:
    """The weights whose gradients need the expert rows."""
    return {(name, "weight") for name in form.projections[:-1]}


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kept: torch.Tensor,
    plan: Plan,
    pre_activations: list[torch.Tensor],
    stacks: ExpertWeights,
    wanted: set[tuple[str, str]],
    stages: Stages,
    run: Run,
) -> tuple[torch.Tensor, torch.Tensor, SlotGrads]:
    """The stages of backward; arguments and results as in :func:`sequential.backward`."""
    form = stacks.layout.form
    grad = grad.contiguous()
    of_down, found = (form.down, "weight") in wanted, {}
    with stages("expert_gemm backward"):
        down = Operand("down back", stacks.down, transposed=True)
        (grad_hidden,), kept_grad = project_arriving(grad, [down], plan, run, keep=of_down)
        grad_row_weights, grad_pre_activations, hidden = activation_backward(
            grad_hidden, plan.row_weights, pre_activations, stacks, keep_hidden=of_down
        )
        del grad_hidden
    tiles = return_tiles(grad.shape[1], grad.dtype, plan, run)
    scalars = scalar_return(grad_row_weights, tiles, plan, run)
    run.op.scalars(collects=False, **scalars)

    def weight_gradients() -> None:
        nonlocal hidden, kept_grad
        with stages("expert_gemm weight gradients"):
            if of_down:
                found.update(
                    down_grads(expand_rows(kept_grad, grad, plan), hidden, plan.row_weights, form, plan, wanted)
                )
            hidden = kept_grad = None
            rows = expand_rows(kept, x, plan) if input_weights(form) & wanted else None
            found.update(input_grads(grad_pre_activations, rows, stacks, plan, wanted))

    pairs = [
        (part, Operand(f"input {i} back", stack, transposed=True))
        for i, (part, stack) in enumerate(zip(grad_pre_activations, stacks.inputs))
    ]
    grad_x = return_while_computed(pairs, tiles, plan, run, stages, meanwhile=weight_gradients)
    with stages("dispatch backward"):
        grad_weights = torch.empty_like(plan.slots, dtype=torch.float32)
        run.op.scalars(collects=True, **{**scalars, "results": grad_weights.data_ptr()})
    return grad_x.to(x.dtype), grad_weights, found
