"""The experts of this rank: what they have in common, and where their parameters lie."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn

from .expert_form import common_form, hooks_of
from .expert_gemm import run_modules
from .expert_weights import WeightLayout, by_expert, cast, find_layout, split_slots
from .layout import Plan
from .weight_maps import WeightMaps


class LocalExperts:
    """The local experts as modules: their common form, and a check for every forward that it still holds.

    Attributes:
        modules: the experts.
        form: the form that all of them share, or ``None`` where they must run as they are.
        maps: the tables through which the overlap backend reads their weights.
    """

    def __init__(self, experts: nn.ModuleList):
        self.modules = experts
        self.form = common_form(experts)
        self.maps = WeightMaps()
        modules = [module for expert in experts for module in expert.modules()]
        self._layouts: dict[torch.dtype, WeightLayout] = {}
        self._aligned: dict[torch.dtype, bool] = {}
        self._training = experts.training
        # Of a linear map only its parameters, hooks and an overridden forward matter: the last is one attribute more.
        linears = [module for module in modules if type(module) is nn.Linear]
        others = [module for module in modules if type(module) is not nn.Linear]
        self._dicts = [vars(module) for module in others]
        self._dicts += [module._modules for module in (experts, *others)]
        self._copies = list(map(dict, self._dicts))
        self._linears = [vars(module) for module in linears]
        self._num_attributes = list(map(len, self._linears))
        self._hooks = [hooks for module in modules for hooks in hooks_of(module)]
        self._hooked = any(self._hooks)
        self._slots = []
        if self.form is not None:
            self._slots = [
                (expert.get_submodule(name)._parameters, kind) for name, kind in self.form.slots for expert in experts
            ]
        self._parameters = [parameters[kind] for parameters, kind in self._slots]
        self._places = _places(self._parameters)
        self._looks = list(map(_look, self._parameters))
        self._unbiased = [m._parameters for m in linears if m.bias is None]

    def run(self, rows: torch.Tensor, row_weights: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Weighted outputs of expert rows, [R, H] -> [R, H], differentiated by autograd."""
        return run_modules(self.modules, rows, row_weights, plan)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all experts, slot by slot of the form, as they were at the last look."""
        return self._parameters

    def state(self) -> tuple[int, int]:
        """As :func:`state_of` the parameters at the last look, which has just been."""
        return _versions(self._parameters), sum(self._places[0])

    def down_shape(self) -> tuple[int, int]:
        """H and I of the down projection [H, I]."""
        slot = self.form.slots.index((self.form.down, "weight"))
        return tuple(self._parameters[slot * len(self.modules)].shape)

    def weight_layout(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> WeightLayout:
        """How the parameters, or their copies where ``dtype`` differs from theirs, lie in memory."""
        layout = self._layouts.get(dtype)
        if layout is None:
            slots = split_slots(self.form, parameters)
            slots = cast(slots, dtype) if parameters[0].dtype != dtype else slots
            layout = self._layouts[dtype] = find_layout(self.form, slots)
        return layout

    def are_aligned(self, dtype: torch.dtype) -> bool:
        """Whether every matrix, or its copy where ``dtype`` differs from the parameters', begins at 16 bytes."""
        if dtype not in self._aligned:
            self._aligned[dtype] = self._look_at_alignment(dtype)
        return self._aligned[dtype]

    def _look_at_alignment(self, dtype: torch.dtype) -> bool:
        parameters = self.parameters()
        layout = self.weight_layout(parameters, dtype)
        if parameters[0].dtype != dtype:
            return True
        slots = by_expert(self.form, parameters)
        names = self.form.projections
        runs_of = dict(zip(names, (*(layout.inputs * 2)[: len(names) - 1], layout.down)))
        return all(
            slots[name, "weight"][run.first].data_ptr() % 16 == 0 and run.step * dtype.itemsize % 16 == 0
            for name, runs in runs_of.items()
            for run in runs
        )

    def are_current(self, experts: nn.ModuleList) -> bool:
        """Whether no module got a hook, another child, another mode, or any other attribute since."""
        try:
            return (
                # Identical objects are equal without a look inside.
                self._dicts == self._copies
                and experts.training is self._training
                and any(self._hooks) is self._hooked
                and list(map(len, self._linears)) == self._num_attributes
                and {None}.issuperset(map(_BIAS, self._unbiased))
                and self._parameters_are_current()
            )
        except (RuntimeError, TypeError):
            # Two different tensors were compared, or a parameter is gone.
            return False

    def _parameters_are_current(self) -> bool:
        """Whether the parameters look as they did; their layout is forgotten where they only moved."""
        parameters = [parameters[kind] for parameters, kind in self._slots]
        places = _places(parameters)
        same = places == self._places or list(map(_look, parameters)) == self._looks
        if places != self._places:
            self._places, self._layouts, self._aligned = places, {}, {}
        self._parameters = parameters
        return same


_BIAS, _VERSION = operator.itemgetter("bias"), operator.attrgetter("_version")


def state_of(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Two numbers that change when any parameter is changed in place, or moved; ZeRO-3 moves its own all the time."""
    if hasattr(parameters[0], "ds_id"):
        return 0, 0
    return _versions(parameters), sum(map(torch.Tensor.data_ptr, parameters))


def _versions(parameters: Sequence[torch.Tensor]) -> int:
    return sum(map(_VERSION, parameters))


def _places(parameters: list[nn.Parameter]) -> tuple[list[int], list[int]]:
    """Where the parameters lie and how long they are: changes with whatever is put in their place."""
    return list(map(torch.Tensor.data_ptr, parameters)), list(map(torch.Tensor.numel, parameters))


def _look(parameter: nn.Parameter) -> tuple:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device
