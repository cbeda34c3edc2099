"""Saves what AutoEP trains as a Hugging Face folder; DeepSpeed itself writes its own names, and one rank's experts.

:func:`save_pretrained` serves own loops and transformers' Trainer (``TrainingArguments(deepspeed="ds_config.json")``)
alike, with ``trainer.model_wrapped`` as the engine. ``engine.save_16bit_model`` and the Trainer's ``save_model`` write
the same weights (``engine.py``); ``engine.module.save_pretrained`` still writes one rank's experts.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

from . import gpt_oss
from .agreement import on_rank_0
from .autoep import PEFT_PREFIX, autoep_layers, is_peft
from .overlap_group import check_failures
from .stacked_experts import of_all_ranks
from .whole_model import copies_of, is_frozen


def save_pretrained(engine: DeepSpeedEngine, folder: str | os.PathLike) -> None:
    """Writes the model, or the adapters of a peft model, so that ``from_pretrained`` of transformers or peft loads it.

    All ranks call it: the experts of all of them are brought together, on rank 0's CPU, which holds the whole model.
    Layers may run on this package or be AutoEP's own.

    Raises:
        ValueError: a tensor would be missing, left over or of another shape; says which. Nothing is written.
        RuntimeError: rank 0 could not write, on every rank.
        PeerError: the weights are not valid, as a kernel gave up waiting for a peer.
    """
    check_failures()
    state = hf_state_dict(engine)
    on_rank_0(lambda: engine.module.save_pretrained(folder, state_dict=state), f"save the model to {folder}")


def hf_state_dict(
    engine: DeepSpeedEngine, whole: bool = False, exclude_frozen: bool = False
) -> dict[str, torch.Tensor]:
    """The state that the model would have if nothing had converted it; only rank 0 needs it.

    Args:
        whole: a peft model's routed experts too, which are never part of an adapter.
        exclude_frozen: leaves out the parameters that do not train.

    Raises:
        ValueError: see :func:`save_pretrained`.
    """
    model = engine.module
    has_adapters = is_peft(model)
    if gpt_oss.is_gpt_oss(model) and (whole or not has_adapters):
        state = gpt_oss.hf_state_dict(model, exclude_frozen) or {}
        return state if dist.get_rank() == 0 else {}
    original = _skeleton(model.get_base_model() if has_adapters else model)
    layers = {name.removeprefix(PEFT_PREFIX): layer for name, layer in autoep_layers(model).items()}
    found = AutoEP(original, engine._config.expert_parallel_config).ep_parser() if layers else []
    specs = {spec.moe_module_name: spec for spec in found}
    _check(layers, specs)
    prefixes = tuple(f"{PEFT_PREFIX if has_adapters else ''}{name}." for name in layers)
    values = {name: v for name, v in model.state_dict(keep_vars=True).items() if not name.startswith(prefixes)}
    for prefix, layer, spec in zip(prefixes, layers.values(), (specs[name] for name in layers)):
        values.update({prefix + name: value for name, value in _renamed(layer, spec).items()})
    state = copies_of({n: v for n, v in values.items() if not (exclude_frozen and is_frozen(v))}, _copied)
    for prefix, layer, spec in zip(prefixes, layers.values(), (specs[name] for name in layers)):
        if (whole or not has_adapters) and not (exclude_frozen and all(map(is_frozen, layer.experts.parameters()))):
            state.update({prefix + name: value for name, value in _experts(layer, spec, original).items()})
    if not has_adapters and not exclude_frozen:
        _check_names(state, original)
    return state if dist.get_rank() == 0 else {}


def _whole(value: torch.Tensor) -> AbstractContextManager:
    """Within it ZeRO-3 brings the parameter together, on all ranks that share it."""
    return GatheredParameters([value], enabled=hasattr(value, "ds_id"))


def _place() -> str:
    """Where tensors go: rank 0 needs their values, the others their shapes."""
    return "cpu" if dist.get_rank() == 0 else "meta"


def _copied(value: torch.Tensor) -> torch.Tensor:
    with _whole(value):
        return value.detach().to(_place(), copy=True)


def _skeleton(model: nn.Module) -> nn.Module:
    """The model before AutoEP, with names and shapes but no values."""
    with torch.device("meta"):
        return type(model)(model.config)


def _renamed(layer: AutoEPMoELayer, spec: MoELayerSpec) -> dict[str, torch.Tensor]:
    """The layer's tensors besides its routed experts, by the names that they had before AutoEP; no copies."""
    bias_owner = spec.router_name if spec.e_score_correction_bias_path is None else spec.e_score_correction_bias_path
    old_names = {
        "router.gate.": f"{spec.router_name}.",
        "router.e_score_correction_bias": f"{bias_owner}.e_score_correction_bias".removeprefix("."),
        "shared_experts.": f"{spec.shared_experts_name}.",
        "shared_experts_gate.": f"{spec.shared_experts_gate_name}.",
    }
    return {
        old + name.removeprefix(new): value
        for name, value in layer.state_dict(keep_vars=True).items()
        for new, old in old_names.items()
        if name.startswith(new)
    }


def _experts(layer: AutoEPMoELayer, spec: MoELayerSpec, original: nn.Module) -> dict[str, torch.Tensor]:
    """The routed experts of all ranks, stacked as before AutoEP; a collective of the expert-parallel group."""
    gate, down, up = (_gathered(getattr(layer.experts, name), layer) for name in ("w1", "w2", "w3"))
    names = [f"{spec.experts_name}.{name}" for name in (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name)]
    if spec.expert_w3_name is not None:
        return dict(zip(names, (gate, down, up)))
    source = original.get_submodule(spec.moe_module_name)
    layout = classify_fused_gate_up_layout(*(tuple(source.get_parameter(name).shape) for name in names[:2]))
    gate_up = torch.cat([gate, up], dim=1)
    if layout.layout != "gate_up_first":
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return dict(zip(names, (gate_up, down)))


def _gathered(local: torch.Tensor, layer: AutoEPMoELayer) -> torch.Tensor:
    """[E_local, ...] of every rank -> [E, ...] on CPU, without values but on rank 0; AutoEP places experts by rank."""
    with _whole(local):
        parts = of_all_ranks(local.detach(), layer.ep_size, layer.ep_group)
    return torch.cat([part.to(_place()) for part in parts])


def _check(layers: dict[str, AutoEPMoELayer], specs: dict[str, MoELayerSpec]) -> None:
    faults = [f"'{name}': AutoEP does not find it in the model's class" for name in layers if name not in specs]
    faults += [
        f"'{name}': its experts were '{spec.expert_storage}', expected 'fused_3d'"
        for name, spec in specs.items()
        if spec.expert_storage != "fused_3d"
    ]
    if faults:
        raise ValueError("cannot export these AutoEP layers to Hugging Face's format:\n  " + "\n  ".join(faults))


def _check_names(state: dict[str, torch.Tensor], original: nn.Module) -> None:
    """Refuses a state that ``original`` could not load strictly."""
    expected = {name: tuple(value.shape) for name, value in original.state_dict().items()}
    got = {name: tuple(value.shape) for name, value in state.items()}
    faults = [
        f"'{name}': got {got.get(name, 'no such tensor')}, expected {expected.get(name, 'no such tensor')}"
        for name in sorted(expected.keys() | got.keys())
        if expected.get(name) != got.get(name)
    ]
    if faults:
        raise ValueError("the model does not match its class in Hugging Face's format:\n  " + "\n  ".join(faults))
