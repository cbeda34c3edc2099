"""The default geometry of the tests, its experts, its layers, and a dense reference that knows no ranks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE as StockMoE
from torch import nn

from ds_tileoverlap import configure

H, I, E, TOP_K, T = 64, 128, 8, 2, 33
PLAIN = dict(min_capacity=0, use_rts=False, top2_2nd_expert_sampling=False, drop_tokens=False)
# Of results in a dtype, in the norm.
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Gated(nn.Module):
    """A SwiGLU expert: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden=H, intermediate=I, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LoRA(nn.Module):
    """A frozen Linear with a trainable product of two thin matrices beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def mlp(hidden=H, intermediate=I, bias=True, act=nn.GELU):
    return nn.Sequential(nn.Linear(hidden, intermediate, bias), act(), nn.Linear(intermediate, hidden, bias))


def fill(layer, seed=0, std=0.2, ep_rank=0):
    """Values that depend on the parameter's name and, for experts, on the global expert id: equal at every ep_size."""
    for name, parameter in layer.named_parameters():
        parts = name.split("deepspeed_experts.")
        if len(parts) == 2:
            local, rest = parts[1].split(".", 1)
            name = f"{parts[0]}{int(local) + ep_rank * layer.num_local_experts}.{rest}"
        generator = torch.Generator().manual_seed(seed + sum(ord(c) * 31**i % 65521 for i, c in enumerate(name)))
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        with torch.no_grad():
            parameter.copy_(value)
    return layer


def stock(expert=None, num_experts=E, ep_size=1, k=TOP_K, hidden=H, **options):
    return StockMoE(
        hidden, expert if expert is not None else mlp(hidden), num_experts, ep_size, k, **{**PLAIN, **options}
    )


def ours(layer, backend="sequential", **options):
    """A copy of a stock layer, converted."""
    layer = copy.deepcopy(layer)
    configure(layer, {"tile_overlap": {"enabled": True, "backend": backend, **options}})
    return layer


def both(form=mlp, backend="sequential", **options):
    """Our layer and DeepSpeed's, equal; ``form`` is an expert, or a function that makes one of the default size."""
    layer = fill(stock(form() if form in (mlp, Gated) else form, **options))
    return ours(layer, backend), layer


def experts_of(layer):
    return layer.deepspeed_moe.experts.deepspeed_experts


def is_grouped(layer):
    """Whether our layer would compute its experts by grouped GEMMs now."""
    return layer.deepspeed_moe.tile_overlap.experts(experts_of(layer)).form is not None


def tanh_mlp():
    return mlp(act=nn.Tanh)


def tokens(seed, *shape, hidden=H, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, hidden, generator=generator, dtype=torch.float64).to(dtype)


def backward_of(layer, x, grad, aux=3.0, used_token=None):
    """Output, l_aux, counts and every gradient of ``(y * grad).sum() + aux * l_aux``."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, l_aux, counts = layer(x, used_token) if used_token is not None else layer(x)
    ((y * grad).sum() + aux * l_aux).backward()
    return {
        "y": y.detach(),
        "l_aux": l_aux.detach(),
        "counts": counts,
        "x.grad": x.grad,
        **{name: p.grad for name, p in layer.named_parameters()},
    }


def assert_close(got, expected, rtol=1e-5):
    """Every tensor of ``got`` equals ``expected`` to ``rtol`` of its largest value (integers exactly)."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), name
        if value is None:
            continue
        assert value.shape == other.shape and value.dtype == other.dtype, (name, value.shape, other.shape, other.dtype)
        if not value.is_floating_point():
            assert torch.equal(value, other), name
            continue
        scale = value.double().abs().max().item() if value.numel() else 0.0
        error = (value.double() - other.double()).abs().max().item() if value.numel() else 0.0
        assert error <= rtol * scale + 1e-30, f"{name}: error {error:.3e} at scale {scale:.3e}"


def relative_errors(got, expected):
    """Errors of every tensor in the norm, relative to it."""
    errors = {}
    for name, value in expected.items():
        difference = (got[name].double() - value.double()).norm()
        errors[name] = (difference / value.double().norm().clamp(min=1e-30)).item()
    return errors


def dense(layers_state, x, expert, k, num_experts=E):
    """R2: dropless top-k MoE in float64 from a full state (gate and all experts), differentiable in everything.

    Args:
        layers_state: name -> float64 tensor; experts by global id.
        x: [T, H] float64.
        expert: a module of the experts' form, used functionally.
    """
    logits = x @ layers_state["deepspeed_moe.gate.wg.weight"].t()
    gates = logits.softmax(1)
    chosen, index = gates.topk(k, dim=1)
    if k > 1:
        chosen = chosen / chosen.sum(1, keepdim=True)
    output = torch.zeros_like(x)
    prefix = "deepspeed_moe.experts.deepspeed_experts."
    for e in range(num_experts):
        state = {name: layers_state[f"{prefix}{e}.{name}"] for name, _ in expert.named_parameters()}
        token, choice = (index == e).nonzero(as_tuple=True)
        result = torch.func.functional_call(expert, state, (x[token],))
        output = output.index_add(0, token, result * chosen[token, choice].unsqueeze(1))
    counts = torch.zeros(num_experts, dtype=torch.long).scatter_add_(
        0, index.flatten(), torch.ones_like(index.flatten())
    )
    balanced = torch.bincount(index[:, 0], minlength=num_experts) if k <= 2 else counts
    l_aux = (gates.mean(0) * balanced / len(x)).sum() * num_experts / (k if k > 2 else 1)
    return output, l_aux, counts
