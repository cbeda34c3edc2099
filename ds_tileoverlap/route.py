"""Stage 1, route: which experts each token goes to, and with what weight. Numerics follow DeepSpeed's ``TopKGate``.

Letters: T tokens of this rank, H hidden size, E experts, k = top_k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import TopKGate

from . import kernels
from .exchange import Peers
from .expert_form import is_watched
from .top_k import BFloat16Routing, TopKRouting, top_k_routing


@dataclass(frozen=True)
class Routes:
    """The router's decision for T tokens.

    Attributes:
        experts: [T, k] int32 global expert ids in the order of choice; -1 where the route was dropped.
        weights: [T, k] float32, differentiable; 0 where the route was dropped.
        l_aux: float32 scalar, the load-balancing loss; ``None`` where the model computes its own.
        exp_counts: [E] int64, this rank's routes to each expert before dropping; ``None`` where nobody asks for them.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    l_aux: torch.Tensor | None
    exp_counts: torch.Tensor | None


@dataclass(frozen=True)
class Routing:
    """What the host knows of a forward's routing without waiting for the device.

    Attributes:
        counts: of the Plan.
        peers: the expert-parallel group.
        num_choices: T k of this rank.
    """

    counts: torch.Tensor
    peers: Peers
    num_choices: int

    @property
    def _of_experts(self) -> torch.Tensor:
        """[W, E] routes from each rank to each expert."""
        size, words = self.counts.shape
        return self.counts[:, : words - size - 1]

    @property
    def load(self) -> float:
        """Rows of the fullest expert over the mean of all, with the tokens of all ranks: 1 is even."""
        rows = self._of_experts.sum(0)
        return (rows.max() / rows.double().mean().clamp_min(1e-9)).item()

    @property
    def dropped(self) -> float:
        """The share of this rank's choices that go to no expert."""
        return 1.0 - self._of_experts[self.peers.rank].sum().item() / self.num_choices if self.num_choices else 0.0


def route(x: torch.Tensor, gate: TopKGate, used_token: torch.Tensor | None = None) -> Routes:
    """Routes T tokens as ``gate`` would.

    Dropless routing neither pads nor communicates, so ranks may bring different numbers of tokens. Dropping keeps
    each source rank's own capacity.

    Args:
        x: [T, H] tokens of this rank.
        gate: the layer's gate; its options and weight are read at every call.
        used_token: [T] mask or ``None``; tokens marked 0 are not routed. Honoured for k = 1, as upstream does.
    """
    if asks_gate(gate):
        return _routes_by_gate(x, gate, used_token)
    weight, mask = gate.wg.weight, used_token if gate.k == 1 else None
    if _is_exact_in_bf16(x, gate):
        noise, noisy_from = _selection_noise(x, gate)
        return Routes(*BFloat16Routing.apply(x, weight, noise, noisy_from, mask, gate.k))
    logits = gate_logits(x, gate)
    noise, noisy_from = _selection_noise(x, gate)
    if kernels.use_triton(logits):
        return Routes(*TopKRouting.apply(logits.float(), noise, noisy_from, mask, gate.k))
    return Routes(*top_k_routing(logits, noise, noisy_from, mask, gate.k))


def asks_gate(gate: TopKGate) -> bool:
    """Whether :func:`route` calls the gate, which then times itself."""
    return gate.drop_tokens or _is_customised(gate)


def _is_exact_in_bf16(x: torch.Tensor, gate: TopKGate) -> bool:
    """Whether tensor cores give the float32 logits: products of two bf16 numbers are exact in float32."""
    jitter = gate.noisy_gate_policy == "Jitter" and gate.training
    both_bf16 = x.is_cuda and x.dtype == gate.wg.weight.dtype == torch.bfloat16
    return both_bf16 and not jitter and not torch.is_autocast_enabled(x.device.type)


def gate_logits(x: torch.Tensor, gate: TopKGate) -> torch.Tensor:
    """Router logits [T, E] in float32 whatever the dtype of ``x`` [T, H] and of the gate's weight [E, H]."""
    x = x.float()
    if gate.noisy_gate_policy == "Jitter" and gate.training:
        x = sharded_moe.multiplicative_jitter(x, device=x.device)
    return F.linear(x, gate.wg.weight.float())


def _selection_noise(x: torch.Tensor, gate: TopKGate) -> tuple[torch.Tensor | None, int]:
    """The random part of choosing [T, E], drawn from torch's generator as upstream does, and the first noisy choice."""
    noise, noisy_from, shape = None, 0, (x.shape[0], gate.wg.weight.shape[0])
    if gate.k == 1 and gate.noisy_gate_policy == "RSample" and gate.training:
        noise = sharded_moe.gumbel_rsample(shape, device=x.device)
    if gate.k == 1 and gate.use_rts:
        # Without dropping, random token selection selects everyone; the draw keeps the generator where upstream has it.
        torch.rand(shape, device=x.device)
    if gate.k == 2 and gate.top2_2nd_expert_sampling:
        noise, noisy_from = sharded_moe.gumbel_rsample(shape, device=x.device), 1
    return noise, noisy_from


def _has_own_forward(gate: TopKGate) -> bool:
    return type(gate).forward is not TopKGate.forward or "forward" in vars(gate)


def _is_customised(gate: TopKGate) -> bool:
    """Whether calling the gate does something that its options alone do not say."""
    return (
        _has_own_forward(gate)
        or is_watched(gate)
        or type(gate.wg) is not torch.nn.Linear
        or bool(gate.wg._forward_hooks or gate.wg._forward_pre_hooks)
    )


@contextmanager
def _without_exchange(gate: TopKGate) -> Iterator[None]:
    """Within the block the gate does not ask the group for its capacity, which nobody needs where nothing is dropped.

    The other ranks may have nothing on their gates, and then call none: this one would wait for them. A ``forward`` of
    the gate's own keeps the group, for what it may exchange.
    """
    group = gate.ep_group
    if not _has_own_forward(gate):
        gate.ep_group = None
    try:
        yield
    finally:
        gate.ep_group = group


def _routes_by_gate(x: torch.Tensor, gate: TopKGate, used_token: torch.Tensor | None) -> Routes:
    """Routes from upstream's gate itself. It cannot take no tokens: it gets dummies then, whose routes are cut off.

    The operations are the same with and without tokens. Were the graph another on a rank without, gradients would
    arrive there in another order, and ZeRO adds up its buckets in the order of arrival.
    """
    num_tokens = x.shape[0]
    num_dummies = 0 if num_tokens else max(gate.min_capacity, 1)
    x = torch.cat([x, x.new_zeros(num_dummies, x.shape[1])])
    with _without_exchange(gate):
        # Upstream's tuple for sparse routes; its index and weight blocks are [k, T].
        l_aux, _, _, experts, _, weights, exp_counts = gate(x, None if num_dummies else used_token, sparse_routes=True)
    exists = 0 if num_dummies else 1
    return Routes(
        experts.t()[:num_tokens].contiguous(),
        weights.t()[:num_tokens].contiguous().float(),
        l_aux * float(exists),
        exp_counts.long() * exists,
    )
