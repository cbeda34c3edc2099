"""Stage 4, expert_gemm: the experts' MLPs over all rows of this rank, as grouped GEMMs where their form is known.

Letters: R expert rows grouped by expert, H hidden size, I intermediate size, E_local experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import kernels
from .activation import hidden_backward, weighted_hidden
from .expert_form import ExpertForm
from .expert_weights import ExpertWeights, Stack, by_expert
from .layout import Plan


def project(rows: torch.Tensor, stack: Stack, plan: Plan) -> torch.Tensor:
    """[R, K] rows times each row's own expert weight [N, K], transposed: [R, N]. Biases are not added."""
    return _by_runs(rows, [(first, end, view.transpose(1, 2)) for first, end, view in stack], plan)


def project_back(grads: torch.Tensor, stack: Stack, plan: Plan) -> torch.Tensor:
    """The gradient of :func:`project` for its rows: [R, N] -> [R, K]."""
    return _by_runs(grads, stack, plan)


def _by_runs(rows: torch.Tensor, stack: Stack, plan: Plan) -> torch.Tensor:
    starts, results = plan.expert_starts, []
    for first, end, view in stack:
        if grouped_mm_runs(rows, view):
            ends = plan.row_offsets[first + 1 : end + 1]
            ends = ends - starts[first] if first else ends
            results.append(F.grouped_mm(rows[starts[first] : starts[end]], view, offs=ends))
        else:
            results += [torch.mm(rows[starts[e] : starts[e + 1]], view[e - first]) for e in range(first, end)]
    return results[0] if len(results) == 1 else torch.cat(results)


def weight_grads(grads: torch.Tensor, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Every expert's weight gradient, grads^T rows: [R, N], [R, K] -> [E_local, N, K]; exactly 0 for an idle expert."""
    shape = (len(plan.expert_counts), grads.shape[1], rows.shape[1])
    if grouped_mm_runs(rows, grads):
        result = F.grouped_mm(grads.t(), rows, offs=plan.row_offsets[1:])
    else:
        result = rows.new_empty(shape)
        for expert, (first, end) in enumerate(zip(plan.expert_starts, plan.expert_starts[1:])):
            torch.mm(grads[first:end].t(), rows[first:end], out=result[expert])
    for expert, count in enumerate(plan.expert_counts):
        if count == 0:
            # The grouped GEMM leaves the gradient of an expert without rows as it found the memory.
            result[expert].zero_()
    return result


def grouped_mm_runs(rows: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM takes these operands: bf16 on a GPU, rows present, 16-byte aligned in both."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or rows.shape[0] == 0:
        return False
    return all(t.data_ptr() % 16 == 0 and all(s == 1 or s % 8 == 0 for s in t.stride()) for t in (rows, other))


def mlp_hidden(
    rows: torch.Tensor, row_weights: torch.Tensor, weights: ExpertWeights, plan: Plan
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden rows scaled by the router weight of their row: [R, H] -> [R, I], and the pre-activations."""
    form = weights.layout.form
    pre_activations = [project(rows, stack, plan) for stack in weights.inputs]
    gate, up = weights.split(pre_activations, 1)
    for name, part in ((form.gate, gate), (form.up, up)):
        if name in weights.biases:
            add_expert_bias_(part, weights.biases[name], plan)
    return weighted_hidden(gate, up, row_weights, form.act), pre_activations


def mlp_output(hidden: torch.Tensor, row_weights: torch.Tensor, weights: ExpertWeights, plan: Plan) -> torch.Tensor:
    """Expert outputs scaled by the router weight of their row, from hidden rows that are: [R, I] -> [R, H]."""
    form = weights.layout.form
    output = project(hidden, weights.down, plan)
    if form.down in weights.biases:
        add_expert_bias_(output, weights.biases[form.down], plan, row_weights)
    return output


def mlp_backward_rows(
    grad: torch.Tensor,
    row_weights: torch.Tensor,
    pre_activations: list[torch.Tensor],
    weights: ExpertWeights,
    plan: Plan,
    keep_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """What :func:`mlp_hidden` and :func:`mlp_output` give back to the owners of the rows.

    Args:
        grad: [R, H] gradient of the outputs.
        pre_activations: as the forward made them; emptied here, so that their memory can be used again.
        keep_hidden: whether the down projection's weight gradient is wanted.

    Returns:
        The gradients of the rows [R, H] and of their weights [R] float32; and for the weight gradients those of the
        pre-activations, as the forward made these, and the weighted hidden rows [R, I] if kept.
    """
    form = weights.layout.form
    grad_hidden = project_back(grad, weights.down, plan)
    grad_row_weights, grad_pre_activations, hidden = activation_backward(
        grad_hidden, row_weights, pre_activations, weights, keep_hidden
    )
    if form.down in weights.biases:
        grad_row_weights += expert_bias_dot(grad, weights.biases[form.down], plan)
    del grad_hidden
    grad_rows = None
    for part, stack in zip(grad_pre_activations, weights.inputs):
        back = project_back(part, stack, plan)
        grad_rows = back if grad_rows is None else grad_rows.add_(back)
    return grad_rows, grad_row_weights, grad_pre_activations, hidden


def activation_backward(
    grad_hidden: torch.Tensor,
    row_weights: torch.Tensor,
    pre_activations: list[torch.Tensor],
    weights: ExpertWeights,
    keep_hidden: bool,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """The gradients of the row weights [R] and of the pre-activations, and the weighted hidden rows [R, I] if kept.

    Args:
        grad_hidden: [R, I] gradient of the weighted hidden rows.
        pre_activations: emptied here, so that their memory can be used again.
    """
    gate, up = weights.split(pre_activations, 1)
    grad_pre_activations = [torch.empty_like(part) for part in pre_activations]
    grad_gate, grad_up = weights.split(grad_pre_activations, 1)
    hidden = up.new_empty(up.shape) if keep_hidden else None
    act = weights.layout.form.act
    grad_row_weights = hidden_backward(gate, up, row_weights, act, grad_hidden, grad_gate, grad_up, hidden)
    pre_activations.clear()
    return grad_row_weights, grad_pre_activations, hidden


# Gradients of parameters: (projection, "weight" or "bias") -> [E_local, ...].
SlotGrads = dict[tuple[str, str], torch.Tensor]
# What makes an expert weight's gradient: :func:`weight_grads` for one Plan, or a kernel that does the same.
WeightGrads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def down_grads(
    grad: torch.Tensor,
    hidden: torch.Tensor | None,
    row_weights: torch.Tensor,
    form: ExpertForm,
    plan: Plan,
    wanted: set[tuple[str, str]],
    weight_grads: WeightGrads,
) -> SlotGrads:
    """Gradients of the down projection from those of the outputs [R, H] and the weighted hidden rows [R, I]."""
    found: SlotGrads = {}
    if (form.down, "weight") in wanted:
        found[form.down, "weight"] = weight_grads(grad, hidden)
    if (form.down, "bias") in wanted:
        found[form.down, "bias"] = expert_sums(grad, plan, row_weights)
    return found


def input_grads(
    grad_pre_activations: list[torch.Tensor],
    rows: torch.Tensor | None,
    weights: ExpertWeights,
    plan: Plan,
    wanted: set[tuple[str, str]],
    weight_grads: WeightGrads,
) -> SlotGrads:
    """Gradients of the gate and up projections from those of the pre-activations and, for weights, the rows [R, H]."""
    form, found = weights.layout.form, {}
    if any((name, "weight") in wanted for name in form.projections[:-1]):
        of_inputs = weights.split([weight_grads(part, rows) for part in grad_pre_activations], 1)
        found[form.gate, "weight"], found[form.up, "weight"] = of_inputs
    for name, part in zip((form.gate, form.up), weights.split(grad_pre_activations, 1)):
        if (name, "bias") in wanted:
            found[name, "bias"] = expert_sums(part, plan)
    return found


def mlp_by_expert(
    rows: torch.Tensor, row_weights: torch.Tensor, form: ExpertForm, plan: Plan, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The experts' MLPs in plain differentiable PyTorch, one by one: the reference, and the double backward."""
    by_slot = by_expert(form, parameters)

    def linear(x, name, expert):
        bias = by_slot[name, "bias"][expert].to(x.dtype) if (name, "bias") in by_slot else None
        return F.linear(x, by_slot[name, "weight"][expert].to(x.dtype), bias)

    outputs = []
    for expert, chunk in enumerate(rows.split(plan.expert_counts)):
        gate = None if form.gate is None else linear(chunk, form.gate, expert)
        hidden = form.act(gate, linear(chunk, form.up, expert))
        outputs.append(linear(hidden, form.down, expert))
    return (torch.cat(outputs) * row_weights.unsqueeze(1)).to(rows.dtype)


def run_modules(
    experts: torch.nn.ModuleList, rows: torch.Tensor, row_weights: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Weighted expert outputs, [R, H] -> [R, H], from experts of any form, each called on a [1, 1, rows, H] block.

    Of a tuple result the first item is the output. An expert without rows runs on one zero row whose result is thrown
    away, so that its parameters get zero gradients and the graph is the same on every rank.
    """
    outputs = []
    for expert, chunk in zip(experts, rows.split(plan.expert_counts)):
        block = chunk if len(chunk) else torch.cat([chunk, rows.new_zeros(1, rows.shape[1])])
        output = expert(block.view(1, 1, *block.shape))
        output = output[0] if isinstance(output, tuple) else output
        outputs.append(output.reshape(block.shape)[: len(chunk)])
    output = torch.cat(outputs)
    return (output * row_weights.unsqueeze(1)).to(output.dtype)


def row_experts(plan: Plan) -> torch.Tensor:
    """[R] int64, the local expert of each row."""
    counts = plan.row_offsets.diff()
    return torch.repeat_interleave(counts, output_size=sum(plan.expert_counts))


def add_expert_bias_(
    rows: torch.Tensor, bias: torch.Tensor, plan: Plan, row_weights: torch.Tensor | None = None
) -> None:
    """Adds each row's own expert bias in place, scaled by the row's weight if given: rows [R, N], bias [E_local, N]."""
    if kernels.use_triton(rows):
        if rows.numel():
            _add_bias_kernel[(rows.shape[0],)](
                rows,
                bias,
                row_experts(plan),
                row_weights if row_weights is not None else rows,
                rows.shape[1],
                rows.stride(0),
                WEIGHTED=row_weights is not None,
                BLOCK=min(kernels.power_of_2(rows.shape[1]), 2048),
            )
        return
    added = bias[row_experts(plan)]
    rows += added if row_weights is None else (added * row_weights.unsqueeze(1)).to(rows.dtype)


def expert_bias_dot(grads: torch.Tensor, bias: torch.Tensor, plan: Plan) -> torch.Tensor:
    """[R] float32, the dot product of each gradient row with its expert's bias."""
    if kernels.use_triton(grads):
        dots = grads.new_empty(grads.shape[0], dtype=torch.float32)
        if grads.numel():
            _bias_dot_kernel[(grads.shape[0],)](
                grads,
                bias,
                row_experts(plan),
                dots,
                grads.shape[1],
                BLOCK=min(kernels.power_of_2(grads.shape[1]), 2048),
            )
        return dots
    wide = torch.promote_types(grads.dtype, torch.float32)
    return (grads.to(wide) * bias[row_experts(plan)]).sum(1)


def expert_sums(grads: torch.Tensor, plan: Plan, row_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Bias gradients: the sum over each expert's rows of [R, N], weighted if asked; [E_local, N], float32 inside."""
    num_experts, width = len(plan.expert_counts), grads.shape[1]
    if kernels.use_triton(grads):
        sums = grads.new_empty(num_experts, width)
        grid = (num_experts, triton.cdiv(width, 64))
        _expert_sums_kernel[grid](
            grads,
            plan.row_offsets,
            row_weights if row_weights is not None else grads,
            sums,
            width,
            grads.stride(0),
            WEIGHTED=row_weights is not None,
            ROWS=64,
            COLUMNS=64,
        )
        return sums
    wide = grads.to(torch.promote_types(grads.dtype, torch.float32))
    if row_weights is not None:
        wide = wide * row_weights.unsqueeze(1)
    return torch.stack([chunk.sum(0) for chunk in wide.split(plan.expert_counts)]).to(grads.dtype)


@kernels.Kernel
@triton.jit
def _add_bias_kernel(rows, bias, experts, row_weights, width, stride, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(bias + expert * width + column, column < width).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(row_weights + row)
        value += tl.load(rows + row * stride + column, column < width).to(tl.float32)
        tl.store(rows + row * stride + column, value.to(rows.dtype.element_ty), column < width)


@kernels.Kernel
@triton.jit
def _bias_dot_kernel(grads, bias, experts, dots, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = tl.load(grads + row * width + column, column < width, other=0.0).to(tl.float32)
        total += grad * tl.load(bias + expert * width + column, column < width, other=0.0).to(tl.float32)
    tl.store(dots + row, tl.sum(total, 0))


@kernels.Kernel
@triton.jit
def _expert_sums_kernel(
    grads,
    row_offsets,
    row_weights,
    sums,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(row_offsets + expert + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.load(row_offsets + expert), end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        value = tl.load(grads + row[:, None].to(tl.int64) * stride + column[None, :], inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(row_weights + row, row < end, other=0.0)[:, None]
        total += tl.sum(value, 0)
    tl.store(sums + expert * width + column, total.to(sums.dtype.element_ty), column < width)
