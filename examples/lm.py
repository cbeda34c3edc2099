"""A byte-level language model with MoE blocks, written for DeepSpeed's own ``MoE`` layer.

B sequences in a batch, S positions, H model width, D head width.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of a model; every ``moe_every``-th block has a MoE layer, the others a dense MLP."""

    d_model: int
    layers: int
    heads: int
    ffn: int
    experts: int
    top_k: int
    moe_every: int


class GatedMLP(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``: the dense MLP and each expert."""

    def __init__(self, d_model: int, ffn: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, ffn, bias=False)
        self.up_proj = nn.Linear(d_model, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, d_model: int, heads: int, seq_len: int):
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        head_dim = d_model // heads
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(seq_len), frequencies)  # [S, D / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        batch, seq_len, _ = x.shape
        # Each [B, heads, S, D].
        q, k, v = self.qkv_proj(x).view(batch, seq_len, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(x.shape))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        # DeepSpeed leaves these buffers in fp32 when it makes the parameters bf16.
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention, then a dense MLP or a MoE layer; both on normalised input, both added to the residual stream."""

    def __init__(self, shape: Shape, seq_len: int, ep_size: int, is_moe: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model)
        self.attention = Attention(shape.d_model, shape.heads, seq_len)
        self.mlp_norm = nn.RMSNorm(shape.d_model)
        mlp = GatedMLP(shape.d_model, shape.ffn)
        if is_moe:
            # Dropless and without random choices, so that evaluation is a function of the weights alone.
            mlp = MoE(
                shape.d_model,
                mlp,
                num_experts=shape.experts,
                ep_size=ep_size,
                k=shape.top_k,
                drop_tokens=False,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """[B, S, H] -> [B, S, H] and the load-balancing loss (0 for a dense block)."""
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp(self.mlp_norm(x))
        y, l_aux, _ = y if isinstance(self.mlp, MoE) else (y, 0.0, None)
        return x + y, l_aux


class LanguageModel(nn.Module):
    """Next-byte prediction; MoE layers sit in every ``shape.moe_every``-th block."""

    def __init__(self, shape: Shape, seq_len: int, ep_size: int, ep_rank: int, seed: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.d_model)
        self.blocks = nn.ModuleList(
            Block(shape, seq_len, ep_size, is_moe=(i + 1) % shape.moe_every == 0) for i in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, VOCABULARY, bias=False)
        _initialise(self, ep_rank, seed)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [B, S + 1] -> (mean cross-entropy in nats per byte, mean load-balancing loss), fp32 scalars."""
        x, auxiliary = self.embedding(tokens[:, :-1]), []
        for block in self.blocks:
            x, l_aux = block(x)
            if isinstance(block.mlp, MoE):
                auxiliary.append(l_aux)
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, torch.stack(auxiliary).mean()


def moe_layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def count_parameters(model: nn.Module, ep_size: int) -> int:
    """Parameters of the whole model, the experts of the other ranks included."""
    return sum(p.numel() * (1 if getattr(p, "allreduce", True) else ep_size) for p in model.parameters())


def _initialise(model: LanguageModel, ep_rank: int, seed: int) -> None:
    """Normal values, scaled by fan-in, from a generator of each parameter's own.

    ``MoE`` starts all experts as copies of one. Here an expert's generator is named after its *global* id, so experts
    differ, and the model is the same at every expert-parallel size.
    """
    num_blocks = len(model.blocks)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue  # norms start at one
        std = parameter.shape[1] ** -0.5 if name != "embedding.weight" else 1.0
        if name.endswith(("out_proj.weight", "down_proj.weight")):
            std *= (2 * num_blocks) ** -0.5  # keeps the residual stream's scale at any depth
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {_global_name(model, name, ep_rank)}".encode()))
        with torch.no_grad():
            parameter.normal_(0.0, std, generator=generator)


def _global_name(model: LanguageModel, name: str, ep_rank: int) -> str:
    """The name with the expert's global id: with 4 experts a rank, ``deepspeed_experts.1.`` is 9 on rank 2."""
    before, marker, after = name.partition("deepspeed_experts.")
    if not marker:
        return name
    local, rest = after.split(".", 1)
    num_local_experts = moe_layers(model)[0].num_local_experts
    return f"{before}{marker}{int(local) + ep_rank * num_local_experts}.{rest}"
