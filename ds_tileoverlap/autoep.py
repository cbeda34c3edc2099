"""DeepSpeed's AutoEP layers on this package: Hugging Face MoE models that ``"expert_parallel"`` has converted.

Router, parameters, checkpoints, shared experts and the form of the output stay AutoEP's; what is replaced is the way of
a token to its experts and back. Shared experts run while the host waits for the ranks' counts. What cannot run (weights
before the experts where a token has several, DeepEP) is refused with the reason.

Keys that AutoEP needs for OLMoE and Qwen2-MoE are filled in. Tested with these two, Mixtral, Qwen3-MoE, Qwen3.5-MoE's
text model, DeepSeek-V2, DeepSeek-V3 and MiniMax-M3 against plain transformers and against AutoEP, ten steps each, and
under ZeRO 1, 2 and 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_layer import (
    AutoEPMoELayer,
    permute_by_local_expert,
    unpermute_by_local_expert,
)
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import nn

from .ahead import Ahead
from .config import TileOverlapConfig
from .expert_form import has_hooks_of_others, is_watched
from .kernels import use_triton
from .layout import Plan
from .route import Routes
from .sequential import compute_dtype
from .stacked_experts import ACTIVATION_OF, StackedRuntime
from .stages import Stages
from .top_k import TopKRouting, top_k_routing

# What peft puts before the names of a model's modules.
PEFT_PREFIX = "base_model.model."

# Names of MoE layers, as a whole, in every family that AutoEP knows.
MOE_LAYERS = rf"({re.escape(PEFT_PREFIX)})?model\.layers\.\d+\.mlp"

# Model type -> keys of "expert_parallel" that AutoEP does not find out by itself, from the model's configuration.
MISSING_KEYS = {
    "olmoe": lambda config: {
        "moe_layer_pattern": MOE_LAYERS,
        "num_experts_attr": "num_experts",
        "route_norm": config.norm_topk_prob,
    },
    "qwen2_moe": lambda config: {"route_norm": config.norm_topk_prob},
    "qwen3_moe": lambda config: {"route_norm": config.norm_topk_prob},
}


def completed(ds_config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """``ds_config`` with what AutoEP has to be told about this model; a key that is there already stays as it is."""
    config = getattr(model, "config", None)
    keys_of = MISSING_KEYS.get(getattr(config, "model_type", None), lambda config: {})
    keys = {"moe_layer_pattern": MOE_LAYERS} if is_peft(model) else {}
    return {**ds_config, "expert_parallel": {**keys, **keys_of(config), **ds_config["expert_parallel"]}}


def is_peft(model: nn.Module) -> bool:
    """Whether peft wraps the model; peft need not be installed."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


class TileAutoEPMoELayer(AutoEPMoELayer):
    """``AutoEPMoELayer`` with this package's stages; an existing instance becomes one through :func:`adopt`."""

    tile_overlap: StackedRuntime
    # DeepSpeed's native layers have it; AutoEP's have no timers.
    wall_clock_breakdown = False
    # As of TileMOELayer.
    forward = torch.compiler.disable(AutoEPMoELayer.forward)

    def _forward(self, hidden_states: torch.Tensor):
        if type(self.experts) is not TileGroupedExperts:
            # What wraps the experts, on every rank, has to see their inputs as AutoEP makes them.
            return super()._forward(hidden_states)
        run, hidden_size = self.tile_overlap, hidden_states.shape[-1]
        x = hidden_states.reshape(-1, hidden_size)
        peers, stages = run.peers(self.ep_group, x.device, self.ep_size), Stages(self)
        watched = _is_watched_by_others(self.experts)
        experts = WatchedExperts(self.experts) if watched else run.experts(self.experts)
        with stages("route"):
            routes = route(x, self.router, self.expert_bias)
            with torch.no_grad():
                self.tokens_per_expert.add_(routes.exp_counts)
            rows = x
            if self.score_apply == "pre":
                rows = (x.float() * routes.weights).to(x.dtype)
                routes = replace(routes, weights=torch.ones_like(routes.weights))

        def from_layout_to_combine(rows: torch.Tensor) -> torch.Tensor:
            return run.routed_experts(rows, routes, experts, peers, self.num_experts, stages)

        with Ahead(self, ("shared_experts",), x) as shared, run.meanwhile(shared.compute):
            output = from_layout_to_combine(rows) if watched else self.experts(rows, from_layout_to_combine)
            return self._finalize_output(output.reshape(hidden_states.shape), x, hidden_states, hidden_size)


def route(x: torch.Tensor, router: TokenChoiceTopKRouter, expert_bias: torch.Tensor | None) -> Routes:
    """Routes tokens [T, H] as ``router`` does; where it is plain top-k of a softmax, with this package's kernels."""
    if expert_bias is not None or not _is_plain(router):
        weights, experts, counts = router(x, expert_bias)
        return Routes(experts.int(), weights.float(), None, counts)
    logits = router.gate(x).float()
    routing = TopKRouting.apply if use_triton(logits) else top_k_routing
    experts, weights, _, counts = routing(logits, None, 0, None, router.top_k, router.route_norm)
    return Routes(experts, weights if router.route_scale == 1 else weights * router.route_scale, None, counts)


def _is_plain(router: TokenChoiceTopKRouter) -> bool:
    """Whether nothing but a softmax decides, and nobody looks at what the router returns."""
    return (
        router.score_func == "softmax"
        and router.num_expert_groups is None
        and router.e_score_correction_bias is None
        # One weight that is made to add up to 1 is 1.
        and (router.top_k > 1 or not router.route_norm)
        and type(router) is TokenChoiceTopKRouter
        and not is_watched(router)
    )


class TileGroupedExperts(GroupedExperts):
    """``GroupedExperts`` around the stages: ZeRO-3 gathers parameters where their module runs, and for its backward."""

    def forward(self, x: torch.Tensor, how: torch.Tensor | Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Tokens [T, H] through the stages; or, where AutoEP asks, expert rows and their counts as it has them."""
        return how(x) if callable(how) else super().forward(x, how)


class WatchedExperts:
    """Experts of AutoEP with a hook or another ``forward``, for the stages: called with expert rows as AutoEP does.

    They are so on this rank only, as far as it knows: AutoEP's own exchanges would wait for ranks that make none.
    """

    form = None

    def __init__(self, experts: nn.Module):
        self._experts = experts

    def run(self, rows: torch.Tensor, row_weights: torch.Tensor, plan: Plan) -> torch.Tensor:
        """As of :class:`~ds_tileoverlap.local_experts.LocalExperts`, in the dtype that the other ranks return."""
        aligned, places, counts, num_rows = permute_by_local_expert(rows, plan.row_offsets.diff())
        outputs = unpermute_by_local_expert(self._experts(aligned, counts), places, num_rows)
        return (outputs * row_weights.unsqueeze(1)).to(compute_dtype(rows))


def _is_watched_by_others(experts: nn.Module) -> bool:
    """Whether a hook or another ``forward`` wants to see rows and outputs; DeepSpeed's own, for ZeRO-3, do not."""
    return "forward" in vars(experts) or has_hooks_of_others(experts)


def refusal(layer: AutoEPMoELayer) -> str | None:
    """Why the layer stays AutoEP's; ``None`` where it can be converted."""
    if type(layer) not in (AutoEPMoELayer, TileAutoEPMoELayer):
        return f"it is a {type(layer).__qualname__}, not a {AutoEPMoELayer.__qualname__}"
    if layer.score_apply == "pre" and layer.top_k > 1:
        return (
            f"it weights rows before its experts (score_apply: 'pre') and sends a token to {layer.top_k} of them, "
            "which then get different rows; one expert a token is possible"
        )
    if layer.comm_backend == DEEPEP_BACKEND:
        return f"it exchanges rows through DeepEP (comm_backend: '{DEEPEP_BACKEND}')"
    if layer.folding_group_handles is not None and layer.folding_group_handles.spec.tp_size > 1:
        return "its expert parallelism is folded into tensor parallelism"
    if layer.experts.activation not in ACTIVATION_OF:
        known = ", ".join(map(repr, ACTIVATION_OF))
        return f"its experts' activation is '{layer.experts.activation}', not one of {known}"
    return None


def autoep_layers(model: nn.Module) -> dict[str, AutoEPMoELayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def adopt(layer: AutoEPMoELayer, config: TileOverlapConfig, name: str) -> None:
    """Makes an AutoEP layer run on this package, in place: same modules, parameters, names and groups."""
    layer.__class__, layer.experts.__class__ = TileAutoEPMoELayer, TileGroupedExperts
    layer.tile_overlap = StackedRuntime(config, name)
