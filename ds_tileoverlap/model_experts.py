"""The experts of a model as DeepSpeed's checkpoints know them: by MoE layer, number and name in the expert's file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from .expert_names import EXPERTS, tensor_name

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layer:
    """A MoE layer: DeepSpeed's, AutoEP's, or one of ours.

    Attributes:
        name: in the model.
        index: among the model's MoE layers, as files are numbered.
        first: the number of this rank's first expert.
        replicas: the ranks that hold the same experts.
    """

    name: str
    index: int
    module: nn.Module
    first: int
    replicas: tuple[int, ...]

    def experts(self) -> dict[int, dict[str, torch.Tensor]]:
        """Number of each local expert -> name in its file -> tensor; nothing where ZeRO-3 has cut the parameters."""
        found = defaultdict(dict)
        if isinstance(self.module, MoE):
            for key, value in self.module.state_dict().items():
                if key.startswith(f"{EXPERTS}."):
                    local, _, name = key.removeprefix(f"{EXPERTS}.").partition(".")
                    number = self.first + int(local)
                    found[number][tensor_name(self.name, number, name)] = value
        elif not any(hasattr(parameter, "ds_id") for parameter in self.module.experts.parameters()):
            for name in ("w1", "w2", "w3"):
                for number, value in enumerate(getattr(self.module.experts, name).detach(), self.first):
                    found[number][f"{self.name}.experts.{name}.{number}"] = value
        return found


def layers_of(model: nn.Module) -> list[Layer]:
    """All MoE layers of a model, in the order in which DeepSpeed numbers them."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            group = module.expert_group_name
        elif getattr(module, "_is_autoep_layer", False):
            group = module.ep_group_name
        else:
            continue
        first = groups._get_expert_parallel_rank(group) * module.num_local_experts
        replicas = torch.distributed.get_process_group_ranks(groups._get_expert_data_parallel_group(group))
        layers.append(Layer(name, len(layers), module, first, tuple(replicas)))
    return layers


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits that tell apart an expert's values and their order, alike on every device.

    Values are added up as integers, which rounds nothing: each row times its number, each tensor times its own.
    """
    total = 0
    for place, value in enumerate(tensors, 1):
        bits = value.detach().contiguous().view(_INTEGERS[value.dtype.itemsize])
        rows = bits.reshape(len(bits) if bits.dim() else 1, -1).sum(1, dtype=torch.int64)
        numbers = torch.arange(1, len(rows) + 1, device=rows.device)
        total += place * int((rows * numbers).sum())
    return total % 2**64
