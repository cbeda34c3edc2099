"""Local experts whose weights are stacked, one parameter for each projection, as DeepSpeed's AutoEP has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed import comm as dist
from torch import nn

from .activation import SILU, Activation
from .expert_form import ExpertForm
from .expert_gemm import mlp_by_expert
from .expert_weights import WeightLayout
from .layer import LayerRuntime
from .layout import Plan
from .local_experts import state_of
from .weight_maps import WeightMaps

# AutoEP's name of an activation -> ours, from the two numbers that stand beside the name.
ACTIVATION_OF: dict[str, Callable[[float, float], Activation]] = {
    "swiglu": lambda alpha, limit: SILU,
    "geglu_tanh": lambda alpha, limit: Activation("gelu_tanh"),
    "swiglu_clamped": lambda alpha, limit: Activation("silu", limit=limit),
    "swiglu_oai": lambda alpha, limit: Activation("silu", alpha, limit, shift=1.0),
}


def _form(experts: nn.Module) -> ExpertForm:
    act = ACTIVATION_OF[experts.activation](experts.activation_alpha, experts.activation_limit)
    return ExpertForm(act, "w1", "w3", "w2", (hasattr(experts, "w1_bias"),) * 3)


def of_all_ranks(local: torch.Tensor, ep_size: int, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    """[E_local, ...] of every rank of the group, in the order of the experts; all ranks call it."""
    parts = [torch.empty_like(local) for _ in range(ep_size)]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


class StackedExperts:
    """What the stages need of :class:`~ds_tileoverlap.local_experts.LocalExperts`, from stacked weights.

    Attributes:
        modules: ``None``: an expert is no module of its own.
        form: gate, up and down are the parameters w1, w3 and w2, [E_local, I, H], [E_local, I, H], [E_local, H, I];
            where they have biases, those are w1_bias, w3_bias and w2_bias, [E_local, I], [E_local, I], [E_local, H].
        maps: the tables through which the overlap backend reads them.
    """

    def __init__(self, experts: nn.Module):
        self.form = _form(experts)
        self.modules, self.maps = None, WeightMaps()
        self._parameters = self._of(experts)

    def _of(self, experts: nn.Module) -> list[nn.Parameter]:
        return [getattr(experts, name if kind == "weight" else f"{name}_{kind}") for name, kind in self.form.slots]

    def are_current(self, experts: nn.Module) -> bool:
        """Takes the parameters that the module has now; whether it still computes the same."""
        self._parameters = self._of(experts)
        return _form(experts) == self.form

    def run(self, rows: torch.Tensor, row_weights: torch.Tensor, plan: Plan) -> torch.Tensor:
        """As of :class:`~ds_tileoverlap.local_experts.LocalExperts`."""
        return mlp_by_expert(rows, row_weights, self.form, plan, self._parameters)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def state(self) -> tuple[int, int]:
        return state_of(self._parameters)

    def down_shape(self) -> tuple[int, int]:
        """H and I."""
        return tuple(self._parameters[self.form.slots.index((self.form.down, "weight"))].shape[1:])

    def weight_layout(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> WeightLayout:
        return WeightLayout(self.form)

    def are_aligned(self, dtype: torch.dtype) -> bool:
        weights = [p for p in self._parameters if p.dim() == 3 and p.dtype == dtype]
        return all(p.data_ptr() % 16 == 0 and p.is_contiguous() for p in weights)


class StackedRuntime(LayerRuntime):
    """As :class:`~.layer.LayerRuntime`, for experts whose weights are stacked."""

    local_experts = StackedExperts
