"""Expert parameters as stacked matrices: views where memory allows it, never copies of what DeepSpeed keeps in place.

Experts are separate parameters that ZeRO puts into flat buffers, evenly spaced and gate next to up. Evenly spaced ones
are one strided [n, N, K] view. How they lie is found once and kept as numbers; views are made anew in every forward and
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .expert_form import ExpertForm

Slots = list[Sequence[torch.Tensor]]
# The matrices of all local experts: (first expert, end, view [n, N, K]) for each run.
Stack = list[tuple[int, int, torch.Tensor]]


@dataclass(frozen=True)
class Run:
    """Experts ``first`` to ``end`` - 1, whose matrices lie ``step`` elements apart in one storage."""

    first: int
    end: int
    step: int


@dataclass(frozen=True)
class WeightLayout:
    """How the experts' matrices lie in memory; of stacked parameters that is nothing more than their form.

    Attributes:
        form: the experts' form.
        joint: whether every expert holds gate and up next to each other, so that they are one [2I, H] map.
        up_first: whether the first half of the joint map is up.
        inputs: for each input map (up; gate and up; or the joint one) its runs.
        down: the runs of the down projection.
    """

    form: ExpertForm
    joint: bool = False
    up_first: bool = False
    inputs: tuple[tuple[Run, ...], ...] = ()
    down: tuple[Run, ...] = ()


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of all local experts during one forward or backward.

    Attributes:
        inputs: for each input map a list of (first expert, end, view [n, N, H]).
        down: the same of the down projection, views [n, H, I].
        biases: projection name -> [E_local, N].
    """

    layout: WeightLayout
    inputs: list[Stack]
    down: Stack
    biases: dict[str, torch.Tensor]

    def gate_and_up(self) -> tuple[Stack, Stack]:
        """The stacks of the gate and of up, of a form that has both, whether or not they lie in one map."""
        if not self.layout.joint:
            gate, up = self.inputs
            return gate, up
        (stack,) = self.inputs
        half = stack[0][2].shape[1] // 2
        first, second = (
            [(run, end, view[:, rows]) for run, end, view in stack] for rows in (slice(half), slice(half, None))
        )
        return (second, first) if self.layout.up_first else (first, second)

    def split(self, parts: list[torch.Tensor], dim: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The gate's and up's share of one tensor an input map; no gate gives ``None``."""
        if self.layout.form.gate is None:
            return None, parts[0]
        first, second = parts[0].chunk(2, dim) if self.layout.joint else parts
        return (second, first) if self.layout.up_first else (first, second)


def expert_weights(layout: WeightLayout, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> ExpertWeights:
    """The weights as views of the parameters, or of a copy in ``dtype`` where the parameters have another.

    Args:
        layout: how parameters of that dtype lie, from :func:`find_layout`.
        parameters: all local experts', slot by slot of the form.
    """
    form = layout.form
    if are_stacked(parameters):
        by_slot = by_expert(form, [parameter.detach().to(dtype) for parameter in parameters])
        stack = {name: [(0, len(by_slot[name, "weight"]), by_slot[name, "weight"])] for name in form.projections}
        biases = {name: value for (name, kind), value in by_slot.items() if kind == "bias"}
        return ExpertWeights(layout, [stack[name] for name in form.projections[:-1]], stack[form.down], biases)
    slots = split_slots(form, parameters)
    if parameters[0].dtype != dtype:
        slots = cast(slots, dtype)
    by_slot = dict(zip(form.slots, slots))
    gate_and_up = [by_slot[name, "weight"] for name in form.projections[:-1]]
    if layout.joint:
        gate_and_up = [gate_and_up[1 if layout.up_first else 0]]
    inputs = [_views(w, runs, 2 if layout.joint else 1) for w, runs in zip(gate_and_up, layout.inputs)]
    biases = {name: torch.stack(list(slot)) for (name, kind), slot in by_slot.items() if kind == "bias"}
    return ExpertWeights(layout, inputs, _views(by_slot[form.down, "weight"], layout.down, 1), biases)


def are_stacked(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one parameter holds a projection's weights of all local experts, [E_local, N, K]."""
    return parameters[0].dim() == 3


def by_expert(form: ExpertForm, parameters: Sequence[torch.Tensor]) -> dict[tuple[str, str], Sequence[torch.Tensor]]:
    """Slot -> the local experts' parameters, to be indexed by expert."""
    return dict(zip(form.slots, parameters if are_stacked(parameters) else split_slots(form, parameters)))


def split_slots(form: ExpertForm, parameters: Sequence[torch.Tensor]) -> Slots:
    """The flat list of parameters, slot by slot."""
    num_experts = len(parameters) // len(form.slots)
    return [parameters[i : i + num_experts] for i in range(0, len(parameters), num_experts)]


def _views(weights: Sequence[torch.Tensor], runs: tuple[Run, ...], height: int):
    views = []
    for run in runs:
        weight = weights[run.first]
        rows, columns = weight.shape
        size, stride = (run.end - run.first, height * rows, columns), (run.step, columns, 1)
        views.append((run.first, run.end, weight.as_strided(size, stride, weight.storage_offset())))
    return views


def find_layout(form: ExpertForm, slots: Slots) -> WeightLayout:
    """Looks where the experts' matrices lie. They must be contiguous, each on its own."""
    by_slot = dict(zip(form.slots, slots))
    inputs = [by_slot[name, "weight"] for name in form.projections[:-1]]
    down = _runs(by_slot[form.down, "weight"])
    if form.gate is not None:
        for first, second in (inputs, inputs[::-1]):
            if all(a.shape == b.shape and _step(a, b) == a.numel() for a, b in zip(first, second)):
                return WeightLayout(form, True, first is inputs[1], (_runs(first, height=2),), down)
    return WeightLayout(form, False, False, tuple(_runs(weights) for weights in inputs), down)


def _runs(weights: Sequence[torch.Tensor], height: int = 1) -> tuple[Run, ...]:
    runs, first = [], 0
    while first < len(weights):
        end = first + 1
        step = _step(weights[first], weights[end]) if end < len(weights) else None
        if step is not None and step >= height * weights[first].numel():
            while end < len(weights) and _step(weights[end - 1], weights[end]) == step:
                end += 1
        else:
            step = height * weights[first].numel()
        runs.append(Run(first, end, step))
        first = end
    return tuple(runs)


def _step(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Elements from ``a`` to ``b`` if one view can span both."""
    same_storage = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return b.storage_offset() - a.storage_offset() if same_storage else None


def cast(slots: Slots, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Copies of the parameters in another dtype, in one buffer: expert by expert, an expert's matrices side by side."""
    # Matrices first: vectors of odd lengths between them would spoil their alignment.
    order = sorted(range(len(slots)), key=lambda i: slots[i][0].dim() < 2)
    sizes = [slot[0].numel() for slot in slots]
    buffer = torch.empty(len(slots[0]), (sum(sizes) + 7) // 8 * 8, dtype=dtype, device=slots[0][0].device)
    copies: list[list[torch.Tensor]] = [[] for _ in slots]
    for line in buffer:
        start = 0
        for i in order:
            copies[i].append(line[start : start + sizes[i]].view(slots[i][0].shape))
            start += sizes[i]
    torch._foreach_copy_([c for copy in copies for c in copy], [p.detach() for slot in slots for p in slot])
    return copies
