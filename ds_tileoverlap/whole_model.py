"""The weights of a whole model, with the experts of all ranks, on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from torch import nn

from .agreement import of_every_rank
from .expert_names import EXPERT_TENSOR, tensor_name
from .layer import runtimes_of
from .overlap_group import check_failures
from .stacked_experts import StackedRuntime, of_all_ranks


def whole_state_dict(engine: DeepSpeedEngine, exclude_frozen: bool = False) -> dict[str, Any]:
    """The state dict that the model would have on one rank; all ranks call it, rank 0 gets it, on its CPU.

    Experts of DeepSpeed's MoE layers have their global numbers, as in a model built with ``ep_size=1``. A Hugging Face
    model has the names and shapes that it had before AutoEP, or this package, converted it. Of tensor-parallel weights
    only rank 0's shards are there, as DeepSpeed saves them.

    Args:
        exclude_frozen: leaves out the parameters that do not train.

    Returns:
        The state dict on rank 0, an empty one on the others.

    Raises:
        ValueError: the ranks' experts differ in names or shapes, or see :func:`.hf_export.hf_state_dict`.
        PeerError: the weights are not valid, as a kernel gave up waiting for a peer.
    """
    check_failures()
    if any(isinstance(runtime, StackedRuntime) for runtime in runtimes_of(engine.module)):
        from .hf_export import hf_state_dict  # transformers, for those alone who have a model of it

        return hf_state_dict(engine, whole=True, exclude_frozen=exclude_frozen)
    return _with_all_experts(engine, exclude_frozen)


def is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def copies_of(values: dict[str, Any], copy: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A copy of each tensor; one that has two names, as tied embeddings have, stays one."""
    copies = {}
    for value in values.values():
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            copies[id(value)] = copy(value)
    return {name: copies.get(id(value), value) for name, value in values.items()}


def _with_all_experts(engine: DeepSpeedEngine, exclude_frozen: bool) -> dict[str, Any]:
    layers = {name: module for name, module in engine.module.named_modules() if isinstance(module, MoE)}
    values = engine.module_state_dict(keep_vars=True)
    matches = {key: match for key in values if (match := EXPERT_TENSOR.fullmatch(key)) and match["layer"] in layers}
    kinds = of_every_rank({key: _kind(values[key]) for key in matches})
    _check_alike(kinds)
    others = {key: v for key, v in values.items() if key not in matches and not (exclude_frozen and is_frozen(v))}
    state = copies_of(others, lambda value: value.detach().to("cpu", copy=True)) if dist.get_rank() == 0 else {}
    for key, match in matches.items():
        layer = layers[match["layer"]]
        group = layer.deepspeed_moe.ep_group
        parts = of_all_ranks(values[key].detach(), layer.ep_size, group)
        for place, rank in enumerate(torch.distributed.get_process_group_ranks(group)):
            expert = int(match["expert"]) + place * layer.num_local_experts
            if dist.get_rank() == 0 and not (exclude_frozen and kinds[rank][key].is_frozen):
                state[tensor_name(match["layer"], expert, match["name"])] = parts[place].cpu()
    return state


@dataclass(frozen=True)
class _Kind:
    """What a tensor is, besides its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_frozen: bool = field(compare=False)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


def _kind(value: torch.Tensor) -> _Kind:
    return _Kind(tuple(value.shape), value.dtype, is_frozen(value))


def _check_alike(kinds: list[dict[str, _Kind]]) -> None:
    """Refuses experts that cannot be exchanged: those of every rank have to be as those of rank 0."""
    faults = [
        f"'{key}': got {kind.get(key, 'no tensor')} on rank {rank}, {kinds[0].get(key, 'no tensor')} on rank 0"
        for rank, kind in enumerate(kinds)
        for key in sorted(kinds[0].keys() | kind.keys())
        if kind.get(key) != kinds[0].get(key)
    ]
    if faults:
        raise ValueError("the experts of all ranks cannot be brought together:\n  " + "\n  ".join(faults))
