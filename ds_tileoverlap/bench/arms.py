"""The arms of the benchmarks: one MoE layer of the same weights and routing, as different packages run it."""

from __future__ import annotations

from importlib.util import find_spec

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from torch import distributed as dist
from torch import nn

from .. import configure, initialize
from ..layer import runtimes_of
from .shapes import LayerShape

AUTOEP_FUSED = {"combine_impl": "fused_weighted_sum", "gate_up_impl": "fused", "async_split_plan": True}


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def native(shape: LayerShape, device: torch.device, dtype: torch.dtype, backend: str | None) -> MoE:
    """DeepSpeed's layer, dropless, converted to a backend of ours if asked; equal values for equal ranks.

    Expert parameters lie in one buffer in their order, which is where ZeRO-1 and -2 and the bf16 optimizer put them.
    An engine finds its process groups later, or ``set_deepspeed_parallelism``.
    """
    world = dist.get_world_size()
    with torch.device("meta"):
        layer = MoE(
            shape.hidden,
            Gated(shape.hidden, shape.intermediate),
            shape.experts,
            ep_size=world,
            k=shape.top_k,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
    layer.to_empty(device=device).to(dtype)
    parameters = list(layer.deepspeed_moe.experts.parameters())
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    buffer.normal_(0, 0.02, generator=generator)
    for parameter, piece in zip(parameters, buffer.split([p.numel() for p in parameters])):
        parameter.data = piece.view_as(parameter)
        parameter.allreduce = False
        parameter.group_name = layer.expert_group_name
    layer.deepspeed_moe.gate.wg.weight.data.copy_(router_weight(shape, device))
    if backend:
        configure(layer, {"tile_overlap": {"enabled": True, "backend": backend}})
    return layer


class Chunks(nn.Module):
    """A layer on its tokens in pieces, on two streams in turn: one piece is exchanged while another is computed."""

    def __init__(self, layer: MoE, count: int):
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.chunk(self.count, dim=1)
        if not x.is_cuda:
            return torch.cat([self.layer(piece)[0] for piece in pieces], dim=1)
        main, outputs = torch.cuda.current_stream(), []
        streams = [torch.cuda.Stream(x.device) for _ in range(2)]
        for i, piece in enumerate(pieces):
            stream = streams[i % 2]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(self.layer(piece)[0])
            outputs[-1].record_stream(main)
            x.record_stream(stream)
        for stream in streams:
            main.wait_stream(stream)
        return torch.cat(outputs, dim=1)


def router_weight(shape: LayerShape, device: torch.device) -> torch.Tensor:
    """[E, H], the same on every rank: routing that is mildly uneven on normal inputs, and even over the ranks.

    Experts with longer rows win more tokens. Random rows differ enough where experts are many and H is small; elsewhere
    even-numbered experts get rows longer by ``router_spread``, odd-numbered ones shorter. With ``rank_spread`` those of
    rank 0 are longer by as much, all others shorter.
    """
    generator = torch.Generator(device).manual_seed(7)
    weight = torch.randn(shape.experts, shape.hidden, device=device, generator=generator) * 0.02
    sign = 1 - 2 * (torch.arange(shape.experts, device=device) % 2)
    on_rank_0 = 2 * (torch.arange(shape.experts, device=device) < shape.experts // dist.get_world_size()) - 1
    return weight * ((1 + shape.router_spread * sign) * (1 + shape.rank_spread * on_rank_0)).unsqueeze(1)


def without(options: dict, device: torch.device) -> str | None:
    """Why an arm of AutoEP with these options cannot run here, or ``None``."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    return "its fused options need a GPU" if options and device.type != "cuda" else None


def autoep(
    shape: LayerShape, device: torch.device, dtype: torch.dtype, options: dict, source: MoE, backend: str | None = None
) -> nn.Module:
    """DeepSpeed's AutoEP layer out of a one-layer Hugging Face model, with the weights of ``source``.

    With a backend of ours it is converted, as ``ds_tileoverlap.initialize`` converts it for everybody.
    """
    config = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    engine = autoep_engine(shape, 1, device, dtype, options, backend, config)
    layer = next(m for m in engine.module.modules() if isinstance(m, AutoEPMoELayer))
    with torch.no_grad():
        layer.router.gate.weight.copy_(source.deepspeed_moe.gate.wg.weight)
        for i, expert in enumerate(source.deepspeed_moe.experts.deepspeed_experts):
            layer.experts.w1[i].copy_(expert.gate.weight)
            layer.experts.w3[i].copy_(expert.up.weight)
            layer.experts.w2[i].copy_(expert.down.weight)
    return layer


def autoep_engine(
    shape: LayerShape,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
    options: dict,
    backend: str | None,
    config: dict,
) -> deepspeed.DeepSpeedEngine:
    """An engine for a Hugging Face model of so many layers that AutoEP converts; the same weights on every call."""
    preset, model = _hugging_face_model(shape, layers, device, dtype)
    for module in model.modules():
        if hasattr(module, "gate") and hasattr(module, "experts"):
            module.gate.weight.data.copy_(router_weight(shape, device))
    return initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "steps_per_print": 10**9,
            "expert_parallel": {
                "enabled": True,
                "autoep_size": dist.get_world_size(),
                "preset_model": preset,
                **options,
            },
            "tile_overlap": {"enabled": bool(backend), "backend": backend or "auto"},
            **config,
        },
    )[0]


def _hugging_face_model(
    shape: LayerShape, layers: int, device: torch.device, dtype: torch.dtype
) -> tuple[str, nn.Module]:
    """The name of AutoEP's preset and the model."""
    sizes = dict(
        hidden_size=shape.hidden,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=layers,
        vocab_size=512,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=shape.intermediate,
    )
    if shape.top_k <= 2:
        from transformers import MixtralConfig, MixtralForCausalLM

        preset, model_class = "mixtral", MixtralForCausalLM
        config = MixtralConfig(num_local_experts=shape.experts, **sizes)
    else:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        preset, model_class = "qwen3_moe", Qwen3MoeForCausalLM
        config = Qwen3MoeConfig(
            num_experts=shape.experts,
            moe_intermediate_size=shape.intermediate,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **sizes,
        )
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = model_class(config)
    torch.set_default_dtype(torch.float32)
    return preset, model


def backend_of(layer: nn.Module) -> str | None:
    """The backend of ours that the last forward ran on; ``None`` where the layer is not ours."""
    return next((runtime.backend for runtime in runtimes_of(layer)), None)


def output_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The hidden states alone, of an arm that may return losses and counts beside them."""
    result = layer(x)
    return result[0] if isinstance(result, tuple) else result


@torch.no_grad()
def expert_counts(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[E] int64: how many routes of all ranks' tokens each expert gets from this arm's own router."""
    layer = layer.layer if isinstance(layer, Chunks) else layer
    if hasattr(layer, "router"):  # AutoEP; its running total is no count, it may be kept in bf16
        counts = layer.router(x.view(-1, x.shape[-1]), layer.expert_bias)[2]
    else:
        counts = layer(x)[2]
    counts = counts.to(x.device, torch.int64, copy=True)
    dist.all_reduce(counts)
    return counts


@torch.no_grad()
def exact_output(source: MoE, shape: LayerShape, x: torch.Tensor) -> torch.Tensor:
    """The layer's output for a few tokens [n, H] of this rank in float32, every expert fetched from its owner."""
    world, rank = dist.get_world_size(), dist.get_rank()
    gathered = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(gathered, x)
    everyone = torch.cat(gathered).float()
    logits = everyone @ source.deepspeed_moe.gate.wg.weight.float().t()
    weights, chosen = logits.softmax(1).topk(shape.top_k, dim=1)
    weights = weights / weights.sum(1, keepdim=True) if shape.top_k > 1 else weights
    output = torch.zeros_like(everyone)
    local = shape.experts // world
    for i, expert in enumerate(source.deepspeed_moe.experts.deepspeed_experts):
        token, choice = (chosen == rank * local + i).nonzero(as_tuple=True)
        gate, up, down = (m.weight.float() for m in (expert.gate, expert.up, expert.down))
        rows = everyone[token]
        result = (F.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
        output.index_add_(0, token, result * weights[token, choice].unsqueeze(1))
    dist.all_reduce(output)
    return output.chunk(world)[rank]
