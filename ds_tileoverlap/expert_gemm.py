"""Stage 4, expert_gemm: the experts' MLPs over all rows of this rank, as grouped GEMMs where their form is known.

Letters: R expert rows grouped by expert, H hidden size, I intermediate size, E_local experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import kernels
from .activation import ACTIVATIONS, hidden_backward, weighted_hidden
from .expert_form import ExpertForm
from .layout import Plan


@dataclass(frozen=True)
class Projection:
    """One linear map of every local expert, wherever its parameters lie.

    Attributes:
        weights: E_local tensors [N, K].
        biases: E_local tensors [N], or empty.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]

    def stacked(self) -> list[tuple[int, int, torch.Tensor]]:
        """Maximal runs of experts whose weights are evenly spaced in one storage: (first, end, view [n, N, K])."""
        runs, first = [], 0
        while first < len(self.weights):
            end = _evenly_spaced(self.weights, first)
            weight = self.weights[first]
            step = _step(weight, self.weights[first + 1]) if end - first > 1 else weight.numel()
            view = weight.as_strided((end - first, *weight.shape), (step, *weight.stride()), weight.storage_offset())
            runs.append((first, end, view))
            first = end
        return runs


def _step(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Elements from ``a`` to ``b`` if a view can span both."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.stride() != b.stride():
        return None
    return b.storage_offset() - a.storage_offset()


def _evenly_spaced(weights: list[torch.Tensor], first: int) -> int:
    """The end of the run of evenly spaced weights that starts at ``first``."""
    end = first + 1
    step = _step(weights[first], weights[end]) if end < len(weights) else None
    if step is None or step <= 0 or not weights[first].is_contiguous():
        return end
    while end < len(weights) and _step(weights[end - 1], weights[end]) == step:
        end += 1
    return end


@dataclass(frozen=True)
class InputProjections:
    """The maps from an expert row to its pre-activations.

    Attributes:
        maps: up; or gate and up; or one [2I, H] map where every expert holds the two next to each other.
        gated: whether there is a gate.
        up_first: whether the joint map's first half is up.
    """

    maps: list[Projection]
    gated: bool
    up_first: bool = False

    def split(self, parts: list[torch.Tensor], dim: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The gate's and up's share of one tensor a map; no gate gives ``None``."""
        if not self.gated:
            return None, parts[0]
        first, second = parts[0].chunk(2, dim) if len(parts) == 1 else parts
        return (second, first) if self.up_first else (first, second)


def input_projections(projections: list[Projection]) -> InputProjections:
    """The input side of (gate, up, down) or (up, down), joined into one map where memory allows it."""
    if len(projections) == 2:
        return InputProjections(projections[:1], gated=False)
    gate, up = projections[:2]
    for first, second in ((gate, up), (up, gate)):
        pairs = list(zip(first.weights, second.weights))
        if all(a.is_contiguous() and a.shape == b.shape and _step(a, b) == a.numel() for a, b in pairs):
            joint = [a.as_strided((2 * a.shape[0], a.shape[1]), a.stride(), a.storage_offset()) for a, _ in pairs]
            return InputProjections([Projection(joint, [])], gated=True, up_first=first is up)
    return InputProjections([gate, up], gated=True)


def project(rows: torch.Tensor, projection: Projection, plan: Plan) -> torch.Tensor:
    """[R, K] rows times each row's own expert weight [N, K], transposed: [R, N]. Biases are not added."""
    return _by_runs(rows, projection, plan, transposed=True)


def project_back(grads: torch.Tensor, projection: Projection, plan: Plan) -> torch.Tensor:
    """The gradient of :func:`project` for its rows: [R, N] -> [R, K]."""
    return _by_runs(grads, projection, plan, transposed=False)


def _by_runs(rows: torch.Tensor, projection: Projection, plan: Plan, transposed: bool) -> torch.Tensor:
    starts = list(accumulate(plan.expert_counts, initial=0))
    results = []
    for first, end, view in projection.stacked():
        view = view.transpose(1, 2) if transposed else view
        chunk = rows[starts[first] : starts[end]]
        if grouped_mm_runs(rows, view):
            ends = plan.row_offsets[first + 1 : end + 1]
            results.append(F.grouped_mm(chunk, view, offs=ends - starts[first] if first else ends))
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
        starts = list(accumulate(plan.expert_counts, initial=0))
        for expert, (first, end) in enumerate(zip(starts, starts[1:])):
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


class ExpertMLP(torch.autograd.Function):
    """Expert outputs scaled by the router weight of their row: [R, H] -> [R, H].

    The parameters follow the fixed inputs slot by slot: for each projection E_local weights, then E_local biases if it
    has any. Every parameter that wants a gradient gets one, zeros for an expert without rows.
    """

    @staticmethod
    def forward(ctx, rows, row_weights, form, plan, *parameters):
        projections = _projections(form, parameters, rows.dtype)
        inputs, down = input_projections(projections), projections[-1]
        pre_activations = [project(rows, weights, plan) for weights in inputs.maps]
        gate, up = inputs.split(pre_activations, 1)
        for part, projection in zip((gate, up) if inputs.gated else (up,), projections):
            if projection.biases:
                add_expert_bias_(part, projection.biases, plan)
        output = project(weighted_hidden(gate, up, row_weights, form.act), down, plan)
        if down.biases:
            add_expert_bias_(output, down.biases, plan, row_weights)
        ctx.form, ctx.plan = form, plan.without_tensors()
        ctx.save_for_backward(rows, row_weights, *plan.tensors(), *parameters, *pre_activations)
        return output

    @staticmethod
    @kernels.without_autocast
    def backward(ctx, grad):
        form, num_parameters = ctx.form, len(ctx.needs_input_grad) - 4
        rows, row_weights, *saved = ctx.saved_tensors
        num_plan_tensors = len(ctx.plan.tensors())
        plan = ctx.plan.with_tensors(saved[:num_plan_tensors])
        parameters = saved[num_plan_tensors : num_plan_tensors + num_parameters]
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, grad, rows, row_weights, plan, parameters)
        pre_activations = saved[num_plan_tensors + num_parameters :]
        num_experts = len(plan.expert_counts)
        wanted = dict(
            zip(
                form.slots,
                [any(ctx.needs_input_grad[4 + i : 4 + i + num_experts]) for i in range(0, num_parameters, num_experts)],
            )
        )
        projections = _projections(form, parameters, rows.dtype)
        inputs, down = input_projections(projections), projections[-1]
        grad = grad.contiguous()
        slots = {}

        gate, up = inputs.split(pre_activations, 1)
        grad_pre_activations = [torch.empty_like(part) for part in pre_activations]
        grad_gate, grad_up = inputs.split(grad_pre_activations, 1)
        hidden = up.new_empty(up.shape) if wanted[form.down, "weight"] else None
        grad_hidden = project_back(grad, down, plan)
        grad_row_weights = hidden_backward(gate, up, row_weights, form.act, grad_hidden, grad_gate, grad_up, hidden)
        del grad_hidden, pre_activations, gate, up, saved
        grad_rows = None
        for part, weights in zip(grad_pre_activations, inputs.maps):
            back = project_back(part, weights, plan)
            grad_rows = back if grad_rows is None else grad_rows.add_(back)

        if hidden is not None:
            slots[form.down, "weight"] = weight_grads(grad, hidden, plan)
            del hidden
        if down.biases:
            grad_row_weights += expert_bias_dot(grad, down.biases, plan)
        if wanted.get((form.down, "bias")):
            slots[form.down, "bias"] = expert_sums(grad, plan, row_weights)
        if any(wanted[name, "weight"] for name in form.projections[:-1]):
            in_grads = inputs.split([weight_grads(part, rows, plan) for part in grad_pre_activations], 1)
            slots[form.gate, "weight"], slots[form.up, "weight"] = in_grads
        for name, part in ((form.gate, grad_gate), (form.up, grad_up)):
            if wanted.get((name, "bias")):
                slots[name, "bias"] = expert_sums(part, plan)
        flat = [slots[slot][e] if wanted[slot] else None for slot in form.slots for e in range(num_experts)]
        return grad_rows, grad_row_weights, None, None, *flat


def mlp_by_expert(
    rows: torch.Tensor, row_weights: torch.Tensor, form: ExpertForm, plan: Plan, parameters: list[torch.Tensor]
) -> torch.Tensor:
    """:class:`ExpertMLP` in plain differentiable PyTorch, expert by expert: its reference, and its double backward."""
    projections = _projections(form, parameters, None)
    outputs = []
    for expert, chunk in enumerate(rows.split(plan.expert_counts)):
        *pre, down = [
            (p.weights[expert].to(rows.dtype), p.biases[expert].to(rows.dtype) if p.biases else None)
            for p in projections
        ]
        parts = [F.linear(chunk, *weights) for weights in pre]
        hidden = ACTIVATIONS[form.act](parts[0]) * (parts[1] if len(parts) > 1 else 1)
        outputs.append(F.linear(hidden, *down))
    return (torch.cat(outputs) * row_weights.unsqueeze(1)).to(rows.dtype)


def _differentiable_backward(ctx, grad, rows, row_weights, plan, parameters):
    inputs = [rows, row_weights, *parameters]
    needed = [i for i, needs in zip(inputs, (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[4:])) if needs]
    output = mlp_by_expert(rows, row_weights, ctx.form, plan, parameters)
    grads = iter(torch.autograd.grad(output, needed, grad, create_graph=True, materialize_grads=True))
    found = [next(grads) if needs else None for needs in (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[4:])]
    return *found[:2], None, None, *found[2:]


def _projections(form: ExpertForm, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[Projection]:
    """The projections of a form from the flat list of its parameters, cast to ``dtype`` where they have another."""
    num_experts = len(parameters) // len(form.slots)
    slots = [parameters[i : i + num_experts] for i in range(0, len(parameters), num_experts)]
    if dtype is not None and parameters[0].dtype != dtype:
        slots = _cast(slots, dtype)
    by_slot = dict(zip(form.slots, slots))
    return [Projection(by_slot[name, "weight"], by_slot.get((name, "bias"), [])) for name in form.projections]


def _cast(slots: list[Sequence[torch.Tensor]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Copies of the parameters in ``dtype``, laid out expert by expert so that they stack and gate joins up."""
    sizes = [slot[0].numel() for slot in slots]
    # 16-byte aligned experts, whatever the biases' sizes: matrices first.
    order = sorted(range(len(slots)), key=lambda i: slots[i][0].dim() < 2)
    buffer = torch.empty(len(slots[0]), (sum(sizes) + 7) // 8 * 8, dtype=dtype, device=slots[0][0].device)
    copies: list[list[torch.Tensor]] = [[] for _ in slots]
    for line in buffer:
        start = 0
        for i in order:
            copies[i].append(line[start : start + sizes[i]].view(slots[i][0].shape))
            start += sizes[i]
    torch._foreach_copy_([c for copy in copies for c in copy], [p for slot in slots for p in slot])
    return copies


def run_modules(
    experts: torch.nn.ModuleList, rows: torch.Tensor, row_weights: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Weighted expert outputs, [R, H] -> [R, H], from experts of any form, each called on a [1, 1, rows, H] block.

    Of a tuple result the first item is the output. An expert without rows runs on one zero row whose result is thrown
    away, so that its parameters get zero gradients and the graph is the same on every rank.
    """
    outputs = []
    for expert, chunk in zip(experts, rows.split(plan.expert_counts)):
        block = chunk if len(chunk) else rows.new_zeros(1, rows.shape[1])
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
    rows: torch.Tensor, biases: list[torch.Tensor], plan: Plan, row_weights: torch.Tensor | None = None
) -> None:
    """Adds each row's own expert bias in place, scaled by the row's weight if given: rows [R, N], biases [N] each."""
    bias = torch.stack(biases)
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


def expert_bias_dot(grads: torch.Tensor, biases: list[torch.Tensor], plan: Plan) -> torch.Tensor:
    """[R] float32, the dot product of each gradient row with its expert's bias."""
    bias = torch.stack(biases)
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
