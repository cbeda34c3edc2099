"""Top-k routing of given logits: plain PyTorch, and the same as Triton kernels under autograd functions.

Letters: T tokens of this rank, H hidden size, E experts, k = top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import kernels

# What routing returns: experts [T, k] int32, weights [T, k] float32, l_aux float32 scalar, exp_counts [E] int64.
Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def top_k_routing(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    noisy_from: int,
    used_token: torch.Tensor | None,
    k: int,
    normalize: bool = True,
) -> Routing:
    """Dropless top-k routing in plain PyTorch.

    Args:
        logits: [T, E].
        noise: [T, E] added to the logits for choosing (never for weighting), or ``None``.
        noisy_from: the first choice that sees the noise.
        used_token: [T] or ``None``; tokens marked 0 are not routed.
        k: choices a token.
        normalize: whether the weights of several choices are made to add up to 1.
    """
    num_tokens, num_experts = logits.shape
    gates = F.softmax(logits, dim=1, dtype=torch.float32)
    if noise is None and k > 2:
        experts = gates.topk(k, dim=1).indices
    else:
        experts = _arg_top_k(gates, logits, noise, noisy_from, k)
    chosen = gates.gather(1, experts)
    if normalize and k > 1:
        chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=logits.device).scatter_(1, experts, True)
    if used_token is not None:
        used = used_token.bool().unsqueeze(1)
        experts, chosen, routed = torch.where(used, experts, -1), torch.where(used, chosen, 0.0), routed & used
    exp_counts = routed.sum(0)
    balanced = _one_hot_count(experts[:, 0], num_experts) if k == 2 else exp_counts
    l_aux = (gates.sum(0) * balanced).sum() * _l_aux_scale(num_experts, k, num_tokens)
    return experts.int(), chosen, l_aux, exp_counts


def _arg_top_k(
    gates: torch.Tensor, logits: torch.Tensor, noise: torch.Tensor | None, noisy_from: int, k: int
) -> torch.Tensor:
    """Choices one after the other, each the best of what is left: ties go to the lower expert, as in upstream."""
    chosen, taken = [], torch.zeros_like(gates, dtype=torch.bool)
    for j in range(k):
        # Upstream picks the first expert by softmax value and a later one by logit.
        key = gates if j == 0 else logits
        if noise is not None and j >= noisy_from:
            key = logits + noise
        best = key.masked_fill(taken, float("-inf")).argmax(1, keepdim=True)
        taken = taken.scatter(1, best, True)
        chosen.append(best)
    return torch.cat(chosen, 1)


def _l_aux_scale(num_experts: int, k: int, num_tokens: int) -> float:
    """What sum(gate sums * counted routes) is multiplied by: E * mean gate * mean load for one counted choice a token.

    Upstream counts all k choices from k = 3 on. No tokens have no loss.
    """
    return num_experts / (k if k > 2 else 1) / max(num_tokens, 1) ** 2


def _one_hot_count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return (experts.unsqueeze(1) == torch.arange(num_experts, device=experts.device)).sum(0)


class TopKRouting(torch.autograd.Function):
    """:func:`top_k_routing` as three kernels: choose, reduce, and the gradient of both outputs in one."""

    @staticmethod
    def forward(ctx, logits, noise, noisy_from, used_token, k, normalize=True):
        experts, weights, balanced, l_aux, exp_counts = _route_triton(
            logits, noise, noisy_from, used_token, k, normalize
        )
        ctx.save_for_backward(logits, noise, used_token, experts, balanced)
        ctx.noisy_from, ctx.k, ctx.normalize = noisy_from, k, normalize
        ctx.mark_non_differentiable(experts, exp_counts)
        return experts, weights, l_aux, exp_counts

    @staticmethod
    @kernels.without_autocast
    def backward(ctx, _experts, grad_weights, grad_l_aux, _exp_counts):
        logits, noise, used_token, experts, balanced = ctx.saved_tensors
        if torch.is_grad_enabled():
            _, weights, l_aux, _ = top_k_routing(logits, noise, ctx.noisy_from, used_token, ctx.k, ctx.normalize)
            (grad,) = torch.autograd.grad((weights, l_aux), logits, (grad_weights, grad_l_aux), create_graph=True)
        else:
            grad = _route_backward_triton(logits, experts, balanced, grad_weights, grad_l_aux, ctx.normalize)
        return grad, None, None, None, None, None


class BFloat16Routing(torch.autograd.Function):
    """Logits of bf16 tokens and gate on the tensor cores, routed as :class:`TopKRouting` does.

    Backward splits the float32 gradient of the logits into two bf16 parts, 16 bits of mantissa together, so that both
    of its GEMMs run on the tensor cores too.
    """

    @staticmethod
    @kernels.without_autocast
    def forward(ctx, x, weight, noise, noisy_from, used_token, k):
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        experts, weights, balanced, l_aux, exp_counts = _route_triton(logits, noise, noisy_from, used_token, k)
        ctx.save_for_backward(x, weight, logits, noise, used_token, experts, balanced)
        ctx.noisy_from, ctx.k = noisy_from, k
        ctx.mark_non_differentiable(experts, exp_counts)
        return experts, weights, l_aux, exp_counts

    @staticmethod
    @kernels.without_autocast
    def backward(ctx, _experts, grad_weights, grad_l_aux, _exp_counts):
        x, weight, logits, noise, used_token, experts, balanced = ctx.saved_tensors
        if torch.is_grad_enabled():
            _, *outputs, _ = top_k_routing(
                F.linear(x.float(), weight.float()), noise, ctx.noisy_from, used_token, ctx.k
            )
            grads = (grad_weights, grad_l_aux)
            inputs = [tensor for tensor, need in zip((x, weight), ctx.needs_input_grad) if need]
            found = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:2]), None, None, None, None
        parts = _route_backward_triton(logits, experts, balanced, grad_weights, grad_l_aux, split=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = parts.mm(torch.cat([weight, weight]))
        if ctx.needs_input_grad[1]:
            both = torch.mm(parts.t(), x, out_dtype=torch.float32) if len(x) else parts.new_zeros(2 * weight.numel())
            grad_weight = both.view(2, *weight.shape).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, None, None, None


def _route_triton(logits, noise, noisy_from, used_token, k, normalize=True):
    num_tokens, num_experts = logits.shape
    width = kernels.power_of_2(num_experts)
    block = kernels.tile_rows(width, most=32)
    # One block even for no tokens: it writes the zero sums.
    num_blocks = max(triton.cdiv(num_tokens, block), 1)
    logits = logits.contiguous()
    experts = torch.empty(num_tokens, k, dtype=torch.int32, device=logits.device)
    weights = logits.new_empty(num_tokens, k)
    gate_sums = logits.new_empty(num_blocks, num_experts)
    route_counts, first_counts = experts.new_empty(2, num_blocks, num_experts).unbind()
    used = used_token.to(torch.int32).contiguous() if used_token is not None else experts
    _route_kernel[(num_blocks,)](
        logits,
        noise if noise is not None else logits,
        used,
        experts,
        weights,
        gate_sums,
        route_counts,
        first_counts,
        num_tokens,
        num_experts,
        noisy_from,
        HAS_NOISE=noise is not None,
        HAS_MASK=used_token is not None,
        TOP_K=k,
        NORMALIZE=normalize and k > 1,
        TOP_K_WIDTH=kernels.power_of_2(k),
        BLOCK=block,
        WIDTH=width,
    )
    balanced = experts.new_empty(num_experts)
    l_aux = logits.new_empty(())
    exp_counts = torch.empty(num_experts, dtype=torch.int64, device=logits.device)
    _route_totals_kernel[(1,)](
        gate_sums,
        route_counts,
        first_counts,
        balanced,
        l_aux,
        exp_counts,
        num_blocks,
        num_experts,
        _l_aux_scale(num_experts, k, num_tokens),
        COUNT_FIRST=k == 2,
        BLOCK=kernels.tile_rows(width),
        WIDTH=width,
    )
    return experts, weights, balanced, l_aux, exp_counts


def _route_backward_triton(logits, experts, balanced, grad_weights, grad_l_aux, normalize=True, split=False):
    """The gradient of the logits: [T, E] float32, or [T, 2E] bf16 whose halves add up to it."""
    num_tokens, num_experts = logits.shape
    k = experts.shape[1]
    width = kernels.power_of_2(num_experts)
    block = kernels.tile_rows(width, most=32)
    width_out, dtype = (2 * num_experts, torch.bfloat16) if split else (num_experts, torch.float32)
    grad = logits.new_empty(num_tokens, width_out, dtype=dtype)
    _route_backward_kernel[(max(triton.cdiv(num_tokens, block), 1),)](
        logits.contiguous(),
        experts,
        balanced,
        grad_weights.contiguous(),
        grad_l_aux,
        grad,
        num_tokens,
        num_experts,
        _l_aux_scale(num_experts, k, num_tokens),
        TOP_K=k,
        NORMALIZE=normalize and k > 1,
        SPLIT=split,
        BLOCK=block,
        WIDTH=width,
    )
    return grad


@triton.jit
def _gates(logits, token, expert, num_tokens, num_experts):
    """Softmax of a tile of logits; rows and columns outside are 0."""
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    logit = tl.load(logits + token[:, None].to(tl.int64) * num_experts + expert[None, :], inside, other=0.0)
    shifted = tl.where(inside, logit - tl.max(tl.where(inside, logit, float("-inf")), 1)[:, None], float("-inf"))
    gates = tl.where(inside, tl.exp(shifted), 0.0)
    total = tl.sum(gates, 1)
    return logit, gates / tl.where(token < num_tokens, total, 1.0)[:, None], inside


@triton.jit
def _routes(taken, used):
    """How many of the used tokens took each expert."""
    return tl.sum((taken & used[:, None]).to(tl.int32), 0)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_tokens", "noisy_from"])
def _route_kernel(
    logits,
    noise,
    used_token,
    experts,
    weights,
    gate_sums,
    route_counts,
    first_counts,
    num_tokens,
    num_experts,
    noisy_from,
    HAS_NOISE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    choice = tl.arange(0, TOP_K_WIDTH)
    logit, gates, inside = _gates(logits, token, expert, num_tokens, num_experts)
    used = token < num_tokens
    if HAS_MASK:
        used &= tl.load(used_token + token, used, other=0) != 0
    # Below every real expert lie the taken ones and the padding, so that even a row of NaN gets k distinct experts.
    LOWEST: tl.constexpr = -3.0e38
    key = tl.where(inside & (logit > LOWEST), logit, LOWEST)
    taken = ~inside
    chosen = tl.full((BLOCK, TOP_K_WIDTH), -1, tl.int32)
    weight = tl.zeros((BLOCK, TOP_K_WIDTH), tl.float32)
    row = tl.program_id(0) * num_experts + expert
    for j in tl.static_range(TOP_K):
        noisy = key
        if HAS_NOISE:
            if j >= noisy_from:
                noisy = key + tl.load(
                    noise + token[:, None].to(tl.int64) * num_experts + expert[None, :], inside, other=0.0
                )
        best = tl.argmax(tl.where(taken, float("-inf"), noisy), 1)
        hit = expert[None, :] == best[:, None]
        taken |= hit
        gate = tl.sum(tl.where(hit, gates, 0.0), 1)
        chosen = tl.where(choice[None, :] == j, tl.where(used, best, -1)[:, None].to(tl.int32), chosen)
        weight = tl.where(choice[None, :] == j, tl.where(used, gate, 0.0)[:, None], weight)
        if j == 0:
            tl.store(first_counts + row, _routes(taken & inside, used), expert < num_experts)
    if NORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight, 1), 1.1920928955078125e-07)[:, None]
    inside_k = (token < num_tokens)[:, None] & (choice < TOP_K)[None, :]
    place = token[:, None] * TOP_K + choice[None, :]
    tl.store(experts + place, chosen, inside_k)
    tl.store(weights + place, weight, inside_k)
    tl.store(gate_sums + row, tl.sum(gates, 0), expert < num_experts)
    tl.store(route_counts + row, _routes(taken & inside, used), expert < num_experts)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_blocks", "scale"])
def _route_totals_kernel(
    gate_sums,
    route_counts,
    first_counts,
    balanced,
    l_aux,
    exp_counts,
    num_blocks,
    num_experts,
    scale,
    COUNT_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    expert = tl.arange(0, WIDTH)
    gate_sum = tl.zeros((WIDTH,), tl.float32)
    routes = tl.zeros((WIDTH,), tl.int32)
    firsts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < num_blocks)[:, None] & (expert < num_experts)[None, :]
        place = row[:, None] * num_experts + expert[None, :]
        gate_sum += tl.sum(tl.load(gate_sums + place, inside, other=0.0), 0)
        routes += tl.sum(tl.load(route_counts + place, inside, other=0), 0)
        firsts += tl.sum(tl.load(first_counts + place, inside, other=0), 0)
    counted = firsts if COUNT_FIRST else routes
    tl.store(balanced + expert, counted, expert < num_experts)
    tl.store(exp_counts + expert, routes.to(tl.int64), expert < num_experts)
    tl.store(l_aux, tl.sum(gate_sum * counted.to(tl.float32), 0) * scale)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_tokens", "scale"])
def _route_backward_kernel(
    logits,
    experts,
    balanced,
    grad_weights,
    grad_l_aux,
    grad_logits,
    num_tokens,
    num_experts,
    scale,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    _, gates, inside = _gates(logits, token, expert, num_tokens, num_experts)
    valid = token < num_tokens
    grad_gates = tl.zeros((BLOCK, WIDTH), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    grad_dot_gate = tl.zeros((BLOCK,), tl.float32)
    chosen = tl.zeros((BLOCK, WIDTH), tl.int32)
    for j in range(TOP_K):
        hit = tl.load(experts + token * TOP_K + j, valid, other=-1)[:, None] == expert[None, :]
        gate = tl.sum(tl.where(hit, gates, 0.0), 1)
        grad_weight = tl.load(grad_weights + token * TOP_K + j, valid, other=0.0)
        grad_gates += tl.where(hit, grad_weight[:, None], 0.0)
        chosen |= hit.to(tl.int32)
        total += gate
        grad_dot_gate += gate * grad_weight
    if NORMALIZE:
        # weight_j = gate_j / max(total, eps): below eps the denominator is a constant.
        EPS: tl.constexpr = 1.1920928955078125e-07
        shared = tl.where(total >= EPS, grad_dot_gate / tl.maximum(total, EPS), 0.0)
        grad_gates = tl.where(chosen > 0, (grad_gates - shared[:, None]) / tl.maximum(total, EPS)[:, None], 0.0)
    load = tl.load(balanced + expert, expert < num_experts, other=0).to(tl.float32)
    grad_gates += (tl.load(grad_l_aux) * scale * load)[None, :]
    grad = gates * (grad_gates - tl.sum(gates * grad_gates, 1)[:, None])
    row = token[:, None].to(tl.int64)
    if SPLIT:
        high = grad.to(tl.bfloat16)
        place = grad_logits + row * 2 * num_experts + expert[None, :]
        tl.store(place, high, inside)
        tl.store(place + num_experts, (grad - high.to(tl.float32)).to(tl.bfloat16), inside)
    else:
        tl.store(grad_logits + row * num_experts + expert[None, :], grad, inside)
