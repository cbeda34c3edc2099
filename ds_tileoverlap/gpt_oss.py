"""GPT-OSS of transformers on this package: AutoEP cannot express its experts, whose projections have biases.

It is converted under AutoEP's block of ds_config (``enabled``, ``autoep_size``) before DeepSpeed sees it, for ZeRO 0 to
2. Each rank keeps its share of the experts, stacked; the router stays transformers'. To DeepSpeed such a block is a MoE
layer of its own: tags, process groups, ZeRO and checkpoints follow from that, one entry an expert in the latter.

Letters: E experts, E_local experts of this rank, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
from deepspeed.moe import layer as deepspeed_layer
from deepspeed.runtime import engine
from deepspeed.runtime.config import get_expert_data_topo_config
from deepspeed.utils import groups
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP

from .config import TileOverlapConfig
from .expert_form import is_watched
from .route import Routes
from .stacked_experts import StackedRuntime, of_all_ranks
from .stages import Stages
from .whole_model import copies_of, is_frozen


class TileGptOssMLP(deepspeed_layer.MoE):
    """``GptOssMLP`` on this package's stages; an existing instance becomes one through :class:`Conversion`."""

    tile_overlap: StackedRuntime
    use_residual = enable_expert_tensor_parallelism = False
    # DeepSpeed's native layers have it; this one has no timers.
    wall_clock_breakdown = False

    @property
    def local_experts(self) -> LocalGptOssExperts:
        return self.deepspeed_moe.experts["deepspeed_experts"]

    # As of TileMOELayer.
    @torch.compiler.disable
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [..., H] -> [..., H], and the router's scores [T, k], as ``GptOssMLP`` returns them."""
        run, x = self.tile_overlap, hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = run.experts(self.local_experts)
        peers = run.peers(self.deepspeed_moe.ep_group, x.device, self.ep_size)
        stages = Stages(self)
        with stages("route"):
            _, scores, chosen = self.router(x)
            routes = Routes(chosen.int(), scores.float(), None, None)
        output = run.routed_experts(x, routes, experts, peers, self.num_experts, stages)
        return output.reshape(hidden_states.shape), scores


class _DeepSpeedMoE(nn.Module):
    """What DeepSpeed expects under this name: the group, and the path to the experts that its checkpoints know."""

    def _set_ep_group(self, group: torch.distributed.ProcessGroup) -> None:
        self.ep_group = group


class LocalGptOssExperts(nn.Module):
    """This rank's experts as ``StackedExperts`` takes them, with biases w1_bias, w3_bias and w2_bias.

    A state dict has one entry an expert, ``0.w1`` for [0] of w1, because DeepSpeed saves and loads experts by number.
    """

    activation = "swiglu_oai"

    def __init__(self, experts: GptOssExperts, first: int, end: int, group_name: str):
        super().__init__()
        self.num_experts = end - first
        self.activation_alpha, self.activation_limit = experts.alpha, experts.limit
        for name, source in experts.named_parameters():
            for own_name, value in split(name, source.detach()).items():
                own = value[first:end].clone(memory_format=torch.contiguous_format)
                self.register_parameter(own_name, nn.Parameter(own, source.requires_grad))
        for parameter in self.parameters():
            # DeepSpeed's marks: averaged over the ranks that have the same experts; Muon takes each matrix by itself.
            parameter.allreduce, parameter.group_name = False, group_name
            parameter.is_expert_group = parameter.dim() == 3

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, parameter in self._parameters.items():
            for expert, value in enumerate(parameter if keep_vars else parameter.detach()):
                destination[f"{prefix}{expert}.{name}"] = value

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        for name in self._parameters:
            keys = [f"{prefix}{expert}.{name}" for expert in range(self.num_experts)]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def split(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of ``GptOssExperts`` as those of :class:`LocalGptOssExperts`, in views.

    ``gate_up_proj`` [E, H, 2I], gate and up in turn, becomes w1 and w3 [E, I, H]; ``down_proj`` [E, I, H] w2 [E, H, I].
    """
    suffix = "_bias" if name.endswith("_bias") else ""
    value = value if suffix else value.transpose(1, 2)
    if name.startswith("gate_up"):
        return {f"w1{suffix}": value[:, ::2], f"w3{suffix}": value[:, 1::2]}
    return {f"w2{suffix}": value}


def join(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undoes :func:`split`: the parameters of ``GptOssExperts``, contiguous."""
    joined = {}
    for suffix in ("", "_bias"):
        gate_up = torch.stack((parameters[f"w1{suffix}"], parameters[f"w3{suffix}"]), 2).flatten(1, 2)
        for name, value in (("gate_up_proj", gate_up), ("down_proj", parameters[f"w2{suffix}"])):
            joined[name + suffix] = value if suffix else value.transpose(1, 2).contiguous()
    return joined


def all_experts(
    block: TileGptOssMLP, of: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach
) -> dict[str, torch.Tensor]:
    """``GptOssExperts``' parameters, or what ``of`` makes of each, from all ranks of the group, which all call this."""
    gathered = {}
    for name, parameter in block.local_experts.named_parameters():
        gathered[name] = torch.cat(of_all_ranks(of(parameter), block.ep_size, block.deepspeed_moe.ep_group))
    return join(gathered)


def hf_state_dict(model: nn.Module, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """The model's weights under transformers' names and in its layout, for ``save_pretrained(state_dict=...)``.

    Every rank calls it. One block at a time is gathered on the device; the result is on the CPU.

    Args:
        model: the model that was converted; under an engine, ``engine.module``.
        exclude_frozen: leaves out the parameters that do not train.

    Returns:
        All weights on the first rank of each expert-parallel group, ``None`` on the others.
    """
    blocks = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, TileGptOssMLP)}
    own_names = tuple(f"{name}deepspeed_moe." for name in blocks)
    is_first = all(dist.get_rank(group=block.deepspeed_moe.ep_group) == 0 for block in blocks.values())
    values = {name: v for name, v in model.state_dict(keep_vars=True).items() if not name.startswith(own_names)}
    values = {name: value for name, value in values.items() if not (exclude_frozen and is_frozen(value))}
    state = copies_of(values, lambda value: value.detach().cpu())
    for name, block in blocks.items():
        found = all_experts(block)
        if is_first and not (exclude_frozen and all(map(is_frozen, block.local_experts.parameters()))):
            state |= {f"{name}experts.{key}": value.cpu() for key, value in found.items()}
    return state if is_first else None


def is_gpt_oss(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "gpt_oss"


class Conversion:
    """Makes the MLP blocks of one model run on this package, in place, before DeepSpeed sees the model.

    Args:
        ds_config: its ``"expert_parallel"`` block says in ``autoep_size`` over how many ranks experts are spread.
        call: the arguments of ``deepspeed.initialize``.

    Raises:
        ValueError: lists every part of ``ds_config`` and ``call`` that cannot be.
    """

    def __init__(self, ds_config: dict[str, Any], call: dict[str, Any]):
        if not dist.is_initialized():
            options = {name: call[name] for name in ("distributed_port", "dist_init_required") if name in call}
            dist.init_distributed(get_accelerator().communication_backend_name(), **options)
        self._call, self._sources = call, ReplacementSourceMap()
        self._is_optimizer = engine._client_optimizer_needs_remap(call.get("optimizer"))
        self._is_list = engine._model_parameters_need_remap(call.get("model_parameters"))
        self._ep_size = ds_config["expert_parallel"].get("autoep_size", 1)
        self._data_before_experts = get_expert_data_topo_config(ds_config)
        if faults := self._faults(ds_config):
            raise ValueError("tile_overlap cannot run GPT-OSS: " + "; ".join(faults))

    def _faults(self, ds_config: dict[str, Any]) -> list[str]:
        faults, size, world_size = [], self._ep_size, dist.get_world_size()
        if type(size) is not int or size < 1 or world_size % size:
            faults.append(f"expert_parallel.autoep_size: got {size!r}, expected a divisor of {world_size}, the ranks")
        sizes = {
            "tensor_parallel.autotp_size": ds_config.get("tensor_parallel", {}).get("autotp_size", 1),
            "sequence_parallel_size": ds_config.get("sequence_parallel_size", 1),
        }
        faults += [f"{name}: got {got!r}, expected 1" for name, got in sizes.items() if got not in (0, 1)]
        if (stage := ds_config.get("zero_optimization", {}).get("stage", 0)) == 3:
            faults.append(f"zero_optimization.stage: got {stage}, expected 0, 1 or 2")
        if self._call.get("mpu") is not None:
            faults.append(f"mpu: got a {type(self._call['mpu']).__qualname__}, expected none")
        return faults

    def layers(self) -> dict[str, GptOssMLP]:
        return {name: module for name, module in self._call["model"].named_modules() if isinstance(module, GptOssMLP)}

    def refusal(self, mlp: GptOssMLP) -> str | None:
        """Why the block cannot be converted; ``None`` where it can."""
        experts = mlp.experts
        if type(experts) is not GptOssExperts:
            return f"its experts are {type(experts).__qualname__}, not {GptOssExperts.__qualname__} (dequantize them)"
        if is_watched(experts):
            return "its experts have a hook or another forward, which has to see their inputs"
        if any(hasattr(parameter, "ds_id") for parameter in experts.parameters()):
            return "ZeRO-3 partitions its experts"
        if experts.num_experts % self._ep_size:
            return f"its {experts.num_experts} experts cannot be spread evenly over autoep_size = {self._ep_size} ranks"
        return None

    def adopt(self, mlp: GptOssMLP, config: TileOverlapConfig, name: str) -> None:
        """Makes a block a :class:`TileGptOssMLP` with this rank's share of the experts."""
        source = mlp.experts
        del mlp.experts
        mlp.__class__ = TileGptOssMLP
        mlp.tile_overlap = StackedRuntime(config, name)
        mlp.ep_size, mlp.num_experts = self._ep_size, source.num_experts
        mlp.num_local_experts = mlp.num_experts // mlp.ep_size
        mlp.expert_group_name = f"ep_size_{mlp.ep_size}"
        mlp.deepspeed_moe = _DeepSpeedMoE()
        mlp.set_deepspeed_parallelism(self._data_before_experts)
        first = groups._get_expert_parallel_rank(mlp.expert_group_name) * mlp.num_local_experts
        own = LocalGptOssExperts(source, first, first + mlp.num_local_experts, mlp.expert_group_name)
        mlp.deepspeed_moe.experts = nn.ModuleDict({"deepspeed_experts": own})
        if self._is_optimizer or self._is_list:
            self._remember(source, own)

    def _remember(self, source: GptOssExperts, own: LocalGptOssExperts) -> None:
        """What the new parameters stand for. It keeps the old ones alive, which the caller does then anyway."""
        for name, parameter in source.named_parameters():
            self._sources.discarded.add(id(parameter))
            self._sources.sources |= {id(own.get_parameter(n)): [parameter] for n in split(name, parameter)}

    def follow(self) -> None:
        """Puts the new parameters where an optimizer, or a list of parameters, of the caller's has the old ones."""
        model = self._call["model"]
        if self._is_optimizer:
            engine._remap_client_optimizer_after_module_replacement(self._call["optimizer"], model, self._sources)
        if self._is_list:
            parameters = self._call["model_parameters"]
            engine._remap_model_parameters_after_module_replacement(parameters, model, self._sources)
