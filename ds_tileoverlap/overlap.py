"""The ``overlap`` backend: what travels does so under the GEMM that needs it, or that makes it.

    forward    { dispatch(x) => expert_gemm: hidden } -> { expert_gemm: output => return } -> combine: sum
    backward   { dispatch(dY) => expert_gemm: d hidden } -> { expert_gemm: d rows => return } -> weights -> combine: sum

Each pair in braces is one kernel: two spare warps of every CTA of the GEMM, the couriers, carry rows while the others
multiply. The rows of this rank's own tokens are computed while the others are on their way.
How rows return is chosen in every forward from the exchanged counts, alike on all ranks: as one sum for each (token,
rank) where those are fewer than 0.6 times the rows. Couriers in spare warps were at least as fast as on SMs of their
own on every shape tried, so that ``comm_sms`` is 0 unless set or measured otherwise.
Memory: backward keeps T H + R (H + I') values, I' being 2 I for gated experts (without R H under
``recompute_dispatch``), and about 4 T k + U k + 2 R + S int32 positions (R expert rows, S sent and U received).
Whether the backend can run is decided by the whole group: what a machine cannot do once, when the group is first used;
what a layer cannot do in every forward, with a word in the exchanged counts.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from . import sequential
from .activation import weighted_hidden
from .expert_gemm import (
    SlotGrads,
    activation_backward,
    add_expert_bias_,
    down_grads,
    expert_bias_dot,
    input_grads,
)
from .expert_weights import ExpertWeights, expert_weights
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts
from .overlap_stages import (
    Operand,
    Run,
    ScalarReturn,
    arrived_rows,
    project_arriving,
    project_gated_arriving,
    return_while_computed,
    weight_grads,
)
from .schedule import ARRIVALS, gated_width
from .stages import Stages
from .symmetric_layout import Counting

# A courier finds the rows of a sum in the lanes of its warp.
MAX_TOP_K = 32


def refusal(experts: LocalExperts, dtype: torch.dtype, num_experts: int, top_k: int, op) -> str | None:
    """Why this rank cannot overlap this layer now; ``None`` where it can."""
    if experts.form is None:
        return "its experts are of a form that only runs as it is, module by module"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {dtype}, not in bfloat16 or float16"
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
    x: torch.Tensor, weights: torch.Tensor, experts: LocalExperts, counting: Counting, stages: Stages
) -> torch.Tensor:
    """As :func:`sequential.routed_experts`, on a rank that can overlap; whether all can is known with the counts."""
    anchor = x.new_empty(0, requires_grad=torch.is_grad_enabled())
    dtype, parameters = sequential.compute_dtype(x), experts.parameters()
    run = Run(
        counting.group,
        counting.config,
        experts.maps,
        counting.counts,
        counting.exchange,
        counting.schedules,
        counting.row_bytes,
    )
    return sequential.apply_without_look(
        _OverlappedMLP,
        x,
        weights,
        anchor,
        experts,
        counting,
        dtype,
        stages,
        run,
        counting.config.recompute_dispatch,
        *parameters,
    )


class _OverlappedMLP(sequential.RoutedMLP):
    """:class:`sequential.RoutedMLP` with other stages."""

    @staticmethod
    @without_autocast
    def forward(ctx, x, weights, anchor, experts, counting, dtype, stages, run, recompute_dispatch, *parameters):
        tokens = x.detach().to(dtype).contiguous()
        stacks = expert_weights(experts.weight_layout(parameters, dtype), parameters, dtype)
        form, needs_backward = experts.form, anchor.requires_grad
        overlaps_backward = needs_backward and run.overlaps_backward
        makes_hidden = _makes_hidden(stacks)
        inputs = _input_operands(stacks, makes_hidden)
        arrival_width = gated_width(inputs[0].width) if makes_hidden else inputs[0].width
        down = Operand("down", stacks.down, transposed=False)
        arriving = [arrival_width]
        if overlaps_backward:
            arriving.append(Operand("down back", stacks.down, transposed=True).width)
        # Everything until here is done while the counts are on their way; once they are there, the device waits.
        with stages("layout"):
            plan = counting.finish(arriving, returning=[down.width])
        if not plan.overlaps:
            return sequential.RoutedMLP.forward(
                ctx, x, weights, anchor, experts, plan, dtype, stages, None, recompute_dispatch, *parameters
            )
        with stages("dispatch => expert_gemm"):
            hidden, pre_activations, rows = _hidden_rows(tokens, inputs, makes_hidden, stacks, plan, run)
            pairs = [(hidden, down)]
            if form.down in stacks.biases:
                pairs.append(_bias_pair(stacks.biases[form.down], plan, run, dtype))
        output = return_while_computed(pairs, plan, run, stages, "combine")
        if needs_backward:
            run_backward = (
                partial(backward, run=run, arrival_width=arrival_width) if overlaps_backward else sequential.backward
            )
            rows = None if recompute_dispatch else rows
            sequential.RoutedMLP.keep(
                ctx, x, weights, rows, plan, pre_activations, experts, stages, parameters, dtype, run_backward
            )
        return output


def _makes_hidden(stacks: ExpertWeights) -> bool:
    """Whether the kernel that multiplies what arrives also makes the hidden rows; biases would have to come before."""
    form = stacks.layout.form
    return form.gate is not None and form.act.name == "silu" and not {form.gate, form.up} & stacks.biases.keys()


def _input_operands(stacks: ExpertWeights, makes_hidden: bool) -> list[Operand]:
    """The gate and up, or the maps of both as they lie."""
    if makes_hidden:
        return [Operand(name, stack, transposed=False) for name, stack in zip(("gate", "up"), stacks.gate_and_up())]
    return [Operand(f"input {i}", stack, transposed=False) for i, stack in enumerate(stacks.inputs)]


def _hidden_rows(
    tokens: torch.Tensor, inputs: list[Operand], makes_hidden: bool, stacks: ExpertWeights, plan: Plan, run: Run
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The weighted hidden rows [R, I], the pre-activations, and the expert rows [R, H]."""
    form = stacks.layout.form
    if makes_hidden:
        pre_activations = [tokens.new_empty(plan.num_rows, stack[0][2].shape[1]) for stack in stacks.inputs]
        hidden, rows = project_gated_arriving(tokens, *inputs, stacks.split(pre_activations, 1), form.act, plan, run)
        return hidden, pre_activations, rows
    pre_activations, rows = project_arriving(tokens, inputs, plan, run)
    gate, up = stacks.split(pre_activations, 1)
    for name, part in ((form.gate, gate), (form.up, up)):
        if name in stacks.biases:
            add_expert_bias_(part, stacks.biases[name], plan)
    return weighted_hidden(gate, up, plan.row_weights, form.act), pre_activations, rows


def _bias_pair(bias: torch.Tensor, plan: Plan, run: Run, dtype: torch.dtype) -> tuple[torch.Tensor, Operand]:
    """The down projection's bias [E_local, H], scaled by the row weights, as a product that the GEMM adds.

    A weight goes as two numbers of ``dtype`` whose sum has twice the bits; both multiply the same bias.
    """
    high = plan.row_weights.to(dtype)
    parts = torch.stack((high, (plan.row_weights - high.float()).to(dtype)), 1)
    # Rows of eight are what the bulk copy engine takes.
    columns = run.room("down bias", (*bias.shape, 8), bias)
    columns[..., :2] = bias.unsqueeze(2)
    return F.pad(parts, (0, 6)), Operand("down bias", [(0, len(bias), columns)], transposed=False)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor | None,
    plan: Plan,
    pre_activations: list[torch.Tensor],
    stacks: ExpertWeights,
    wanted: set[tuple[str, str]],
    stages: Stages,
    run: Run,
    arrival_width: int,
) -> tuple[torch.Tensor, torch.Tensor, SlotGrads]:
    """The stages of backward; arguments and results as of :func:`sequential.backward`.

    Args:
        arrival_width: of the schedule by which the tokens came in the forward.
    """
    form = stacks.layout.form
    down = Operand("down back", stacks.down, transposed=True)
    with stages("combine backward => expert_gemm"):
        (grad_hidden,), grad_rows = project_arriving(grad.contiguous(), [down], plan, run)
        grad_row_weights, grad_pre_activations, hidden = activation_backward(
            grad_hidden, plan.row_weights, pre_activations, stacks, keep_hidden=(form.down, "weight") in wanted
        )
        del grad_hidden
        if form.down in stacks.biases:
            grad_row_weights += expert_bias_dot(grad_rows, stacks.biases[form.down], plan)
    with stages("dispatch backward"):
        scalars = ScalarReturn(grad_row_weights, run.tiles(down.width, ARRIVALS), plan, run)
    found: SlotGrads = {}
    multiply = partial(weight_grads, plan=plan, run=run)

    def weight_gradients() -> None:
        nonlocal hidden, grad_rows, rows
        with stages("expert_gemm weight gradients"):
            found.update(down_grads(grad_rows, hidden, plan.row_weights, form, plan, wanted, multiply))
            hidden = grad_rows = None
        if rows is None:
            with stages("dispatch again"):
                tokens = x.to(grad_pre_activations[0].dtype).contiguous()
                rows = arrived_rows(tokens, arrival_width, plan, run)
        with stages("expert_gemm weight gradients"):
            found.update(input_grads(grad_pre_activations, rows, stacks, plan, wanted, multiply))

    pairs = [
        (part, Operand(f"input {i} back", stack, transposed=True))
        for i, (part, stack) in enumerate(zip(grad_pre_activations, stacks.inputs))
    ]
    grad_x = return_while_computed(pairs, plan, run, stages, "dispatch backward", meanwhile=weight_gradients)
    with stages("dispatch backward"):
        grad_weights = scalars.collect()
    return grad_x.to(x.dtype), grad_weights, found
