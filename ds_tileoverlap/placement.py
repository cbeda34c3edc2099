"""The device side of stage 2: counts and positions, as three steps of a stable counting sort.

Letters: T tokens, k = top_k, E experts, W ranks, E_local = E / W; S rows sent, U rows received, R expert rows.
Each step is a Triton kernel or two with a plain PyTorch twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from . import kernels


@dataclass(frozen=True)
class RouteCounts:
    """How many routes and rows this rank sends.

    Attributes:
        counts: [E + W + 1] int32: routes to each expert, tokens that go to each rank, and a word for the caller, 0.
        block_visits: [blocks, W] int32: how many tokens of each block go to each rank (kernels only).
    """

    counts: torch.Tensor
    block_visits: torch.Tensor | None


def count_routes(experts: torch.Tensor, num_experts: int, num_ranks: int) -> RouteCounts:
    """Counts the routes to each expert and the tokens that go to each rank, once however many of its experts they use.

    Args:
        experts: [T, k] int32 global expert ids, -1 for a dropped route. With 4 experts on 2 ranks
            ``[[0, 3, 1], [2, -1, 3]]`` gives counts ``[1, 1, 1, 2, 1, 2, 0]``.
    """
    num_tokens, top_k = experts.shape
    if not (kernels.use_triton(experts) and num_tokens):
        ranks = _ranks(experts, num_experts // num_ranks)
        visits = _one_hot(ranks, num_ranks).any(1)
        counts = torch.cat([_one_hot(experts, num_experts).sum((0, 1)), visits.sum(0), experts.new_zeros(1)])
        return RouteCounts(counts.int(), None)
    tile, num_blocks = _token_tile(num_tokens, num_experts, num_ranks)
    counts = experts.new_zeros(num_experts + num_ranks + 1)
    block_visits = experts.new_empty(num_blocks, num_ranks)
    _count_routes_kernel[(num_blocks,)](
        experts,
        counts,
        block_visits,
        num_tokens,
        num_experts,
        num_ranks,
        num_experts // num_ranks,
        TOP_K=top_k,
        **tile,
    )
    return RouteCounts(counts, block_visits)


def place_tokens(
    experts: torch.Tensor, weights: torch.Tensor, counted: RouteCounts, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives each (token, rank) its row in the send buffer, grouped by rank in the order of tokens.

    Args:
        experts: [T, k] int32 global expert ids, -1 for a dropped route.
        weights: [T, k] float32.
        counted: of the same experts.

    Returns:
        sent_tokens [min(k, W) * T] int32: the token of each sent row; the first S are set.
        choice_slots [T, k] int32: the sent row that carries a choice, -1 for a dropped route.
        token_slots [T, k] int32: the same at the first choice on each rank, -1 elsewhere.
        sent_routes [min(k, W) * T, 2k] int32: what a row's receiver must know, its local expert of each choice
        (-1 where another rank's) and the bits of the weights; the first S rows are set.

        With 4 experts on 2 ranks ``[[0, 3, 1], [2, -1, 3]]`` gives sent tokens ``[0, 0, 1]``, choice slots
        ``[[0, 1, 0], [2, -1, 2]]``, token slots ``[[0, 1, -1], [2, -1, -1]]`` and local experts
        ``[[0, -1, 1], [-1, 1, -1], [0, -1, 1]]``.
    """
    num_tokens, top_k = experts.shape
    most_sent = min(top_k, num_ranks) * num_tokens
    sent_tokens, sent_routes = experts.new_empty(most_sent), experts.new_empty(most_sent, 2 * top_k)
    choice_slots, token_slots = torch.empty_like(experts), torch.empty_like(experts)
    places = (sent_tokens, choice_slots, token_slots, sent_routes)
    place = _place_tokens_triton if kernels.use_triton(experts) and num_tokens else _place_tokens_plain
    place(experts, weights.detach().contiguous().view(torch.int32), counted, num_ranks, *places)
    return places


def _place_tokens_plain(
    experts, weight_bits, counted, num_ranks, sent_tokens, choice_slots, token_slots, sent_routes
) -> None:
    num_local_experts = (counted.counts.numel() - num_ranks - 1) // num_ranks
    ranks = _ranks(experts, num_local_experts)
    visits = _one_hot(ranks, num_ranks).any(1)
    slots = (visits.t().flatten().cumsum(0) - 1).view(num_ranks, len(experts)).t()
    choice_slots.copy_(torch.where(ranks >= 0, slots.gather(1, ranks.clamp(min=0)), -1))
    repeated = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).tril(-1).any(2)
    token_slots.copy_(choice_slots.masked_fill(repeated, -1))
    token, rank = visits.nonzero(as_tuple=True)
    slot = slots[token, rank]
    sent_tokens[slot] = token.int()
    theirs = ranks[token] == rank.unsqueeze(1)
    local = torch.where(theirs, experts[token] % num_local_experts, -1)
    sent_routes[slot] = torch.cat([local, weight_bits[token]], 1)


def _place_tokens_triton(
    experts, weight_bits, counted, num_ranks, sent_tokens, choice_slots, token_slots, sent_routes
) -> None:
    num_tokens, top_k = experts.shape
    num_experts = counted.counts.numel() - num_ranks - 1
    tile, num_blocks = _token_tile(num_tokens, num_experts, num_ranks)
    _place_tokens_kernel[(num_blocks,)](
        experts,
        weight_bits,
        counted.counts,
        counted.block_visits,
        sent_tokens,
        choice_slots,
        token_slots,
        sent_routes,
        num_tokens,
        num_experts,
        num_ranks,
        num_experts // num_ranks,
        TOP_K=top_k,
        BLOCK=tile["BLOCK"],
        RANKS=tile["RANKS"],
        BLOCKS=kernels.tile_rows(tile["RANKS"], most=64),
    )


def place_rows(
    received: torch.Tensor, num_local_experts: int, num_rows: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives each (received row, choice) of this rank's experts its expert row, grouped by expert and then by owner.

    Args:
        received: [U, 2k] int32 routes as :func:`place_tokens` sends them, grouped by owner.
        num_rows: R, known from the exchanged counts.
        first: the received row that comes first within each expert; those before it come last.

    Returns:
        choice_rows [U, k] int32 (-1 where the choice is another rank's), row_sources [R] int32 (the received row of
        each expert row), row_weights [R] float32, row_offsets [E_local + 1] int32.

        Local experts ``[[0, -1, 1], [0, -1, -1]]`` give choice rows ``[[0, -1, 2], [1, -1, -1]]``, row sources
        ``[0, 1, 0]`` and offsets ``[0, 2, 3]``; with ``first`` = 1 choice rows ``[[1, -1, 2], [0, -1, -1]]`` and row
        sources ``[1, 0, 0]``.
    """
    num_received, top_k = received.shape[0], received.shape[1] // 2
    choice_rows, row_sources = received.new_empty(num_received, top_k), received.new_empty(num_rows)
    row_weights = received.new_empty(num_rows, dtype=torch.float32)
    row_offsets = received.new_empty(num_local_experts + 1)
    places = (choice_rows, row_sources, row_weights, row_offsets)
    place = _place_rows_triton if kernels.use_triton(received) and num_received else _place_rows_plain
    place(received, num_local_experts, first, *places)
    return places


def _place_rows_plain(received, num_local_experts, first, choice_rows, row_sources, row_weights, row_offsets) -> None:
    num_received, top_k = choice_rows.shape
    experts, weights = received[:, :top_k].flatten(), received[:, top_k:].contiguous().view(torch.float32).flatten()
    one_hot = _one_hot(experts, num_local_experts)
    row_offsets.copy_(F.pad(one_hot.sum(0).cumsum(0), (1, 0)))
    earlier = one_hot.roll(-first * top_k, 0).cumsum(0).roll(first * top_k, 0) - 1
    rows = torch.where(one_hot, earlier + row_offsets[:-1], -1).amax(1)
    choice_rows.copy_(rows.view(num_received, top_k))
    taken = rows >= 0
    row_sources[rows[taken]] = taken.nonzero().squeeze(1).int() // top_k
    row_weights[rows[taken]] = weights[taken]


def _place_rows_triton(received, num_local_experts, first, choice_rows, row_sources, row_weights, row_offsets) -> None:
    num_received, top_k = choice_rows.shape
    width = kernels.power_of_2(num_local_experts)
    block = kernels.tile_rows(width)
    num_blocks = triton.cdiv(num_received * top_k, block)
    block_starts = received.new_empty(num_blocks, num_local_experts)
    sizes = dict(TOP_K=top_k, BLOCK=block, WIDTH=width)
    _count_rows_kernel[(num_blocks,)](
        received, block_starts, num_received * top_k, first * top_k, num_local_experts, **sizes
    )
    counts = _scan_blocks(block_starts)
    _place_rows_kernel[(num_blocks,)](
        received,
        received.view(torch.float32),
        counts,
        block_starts,
        choice_rows,
        row_sources,
        row_weights,
        row_offsets,
        num_received * top_k,
        first * top_k,
        num_local_experts,
        **sizes,
    )


def _ranks(experts: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    return torch.where(experts >= 0, experts // experts_per_rank, -1).long()


def _one_hot(keys: torch.Tensor, num_keys: int) -> torch.Tensor:
    return keys.unsqueeze(-1) == torch.arange(num_keys, device=keys.device)


def _token_tile(num_tokens: int, num_experts: int, num_ranks: int) -> tuple[dict[str, int], int]:
    experts, ranks = kernels.power_of_2(num_experts), kernels.power_of_2(num_ranks)
    block = kernels.tile_rows(max(experts, ranks), most=64)
    return dict(BLOCK=block, EXPERTS=experts, RANKS=ranks), triton.cdiv(num_tokens, block)


def _scan_blocks(block_counts: torch.Tensor) -> torch.Tensor:
    """Replaces [blocks, n] counts by what earlier blocks counted, and returns each column's total [n]."""
    num_blocks, num_columns = block_counts.shape
    totals = block_counts.new_empty(num_columns)
    width = min(kernels.power_of_2(num_columns), 16)
    grid = (triton.cdiv(num_columns, width),)
    _scan_blocks_kernel[grid](block_counts, totals, num_blocks, num_columns, ROWS=256, COLUMNS=width)
    return totals


@triton.jit
def _rank_of(experts, offset, mask, experts_per_rank):
    expert = tl.load(experts + offset, mask, other=-1)
    return tl.where(expert >= 0, expert // experts_per_rank, -1)


@triton.jit
def _visits(experts, token, valid, experts_per_rank, TOP_K: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    """[BLOCK, RANKS] 0 or 1: whether a token goes to a rank."""
    visits = tl.zeros((BLOCK, RANKS), tl.int32)
    for j in range(TOP_K):
        rank = _rank_of(experts, token * TOP_K + j, valid, experts_per_rank)
        visits |= (rank[:, None] == tl.arange(0, RANKS)[None, :]).to(tl.int32)
    return visits


@kernels.Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _count_routes_kernel(
    experts,
    counts,
    block_visits,
    num_tokens,
    num_experts,
    num_ranks,
    experts_per_rank,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < num_tokens
    column, rank = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    routes = tl.zeros((EXPERTS,), tl.int32)
    for j in range(TOP_K):
        expert = tl.load(experts + token * TOP_K + j, valid, other=-1)
        routes += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
    visits = _visits(experts, token, valid, experts_per_rank, TOP_K, BLOCK, RANKS)
    visited = tl.sum(visits, 0)
    # Integers: whatever the order of the blocks, the sums are the same.
    tl.atomic_add(counts + column, routes, column < num_experts)
    tl.atomic_add(counts + num_experts + rank, visited, rank < num_ranks)
    tl.store(block_visits + tl.program_id(0) * num_ranks + rank, visited, rank < num_ranks)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_blocks"])
def _scan_blocks_kernel(block_counts, totals, num_blocks, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        inside = (block < num_blocks)[:, None] & (column < num_columns)[None, :]
        place = block_counts + block[:, None] * num_columns + column[None, :]
        count = tl.load(place, inside, other=0)
        tl.store(place, before[None, :] + tl.cumsum(count, 0) - count, inside)
        before += tl.sum(count, 0)
    tl.store(totals + column, before, column < num_columns)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _place_tokens_kernel(
    experts,
    weight_bits,
    counts,
    block_visits,
    sent_tokens,
    choice_slots,
    token_slots,
    sent_routes,
    num_tokens,
    num_experts,
    num_ranks,
    experts_per_rank,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < num_tokens
    rank = tl.arange(0, RANKS)
    count = tl.load(counts + num_experts + rank, rank < num_ranks, other=0)
    start = tl.zeros((RANKS,), tl.int32)
    for first_block in range(0, tl.program_id(0), BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)
        inside = (block < tl.program_id(0))[:, None] & (rank < num_ranks)[None, :]
        start += tl.sum(tl.load(block_visits + block[:, None] * num_ranks + rank[None, :], inside, other=0), 0)
    visits = _visits(experts, token, valid, experts_per_rank, TOP_K, BLOCK, RANKS)
    slots = (tl.cumsum(count, 0) - count + start)[None, :] + tl.cumsum(visits, 0) - visits
    for j in range(TOP_K):
        mine = _rank_of(experts, token * TOP_K + j, valid, experts_per_rank)
        routed = mine >= 0
        slot = tl.sum(tl.where(mine[:, None] == rank[None, :], slots, 0), 1)
        first = routed
        for i in range(j):
            first &= _rank_of(experts, token * TOP_K + i, valid, experts_per_rank) != mine
        tl.store(choice_slots + token * TOP_K + j, tl.where(routed, slot, -1), valid)
        tl.store(token_slots + token * TOP_K + j, tl.where(first, slot, -1), valid)
        tl.store(sent_tokens + slot, token, first)
        for i in range(TOP_K):
            expert = tl.load(experts + token * TOP_K + i, valid, other=-1)
            theirs = (expert >= 0) & (expert // experts_per_rank == mine)
            bits = tl.load(weight_bits + token * TOP_K + i, valid, other=0)
            tl.store(sent_routes + slot * 2 * TOP_K + i, tl.where(theirs, expert % experts_per_rank, -1), first)
            tl.store(sent_routes + slot * 2 * TOP_K + TOP_K + i, bits, first)


@triton.jit
def _rotated(element, num_elements, first):
    """The element that comes at a place when ``first`` comes at place 0."""
    return tl.where(element < num_elements, (element + first) % num_elements, element)


@triton.jit
def _local_expert(received, element, num_elements, TOP_K: tl.constexpr):
    place = element // TOP_K * (2 * TOP_K) + element % TOP_K
    return tl.load(received + place, element < num_elements, other=-1)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_elements", "first"])
def _count_rows_kernel(
    received,
    block_counts,
    num_elements,
    first,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    element = _rotated(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), num_elements, first)
    column = tl.arange(0, WIDTH)
    one_hot = _local_expert(received, element, num_elements, TOP_K)[:, None] == column[None, :]
    place = tl.program_id(0) * num_experts + column
    tl.store(block_counts + place, tl.sum(one_hot.to(tl.int32), 0), column < num_experts)


@kernels.Kernel
@triton.jit(do_not_specialize=["num_elements", "first"])
def _place_rows_kernel(
    received,
    received_weights,
    counts,
    block_starts,
    choice_rows,
    row_sources,
    row_weights,
    row_offsets,
    num_elements,
    first,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    element = _rotated(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), num_elements, first)
    column = tl.arange(0, WIDTH)
    exists = column < num_experts
    one_hot = (_local_expert(received, element, num_elements, TOP_K)[:, None] == column[None, :]).to(tl.int32)
    count = tl.load(counts + column, exists, other=0)
    end = tl.cumsum(count, 0)
    start = end - count + tl.load(block_starts + tl.program_id(0) * num_experts + column, exists, other=0)
    row = tl.sum((start[None, :] + tl.cumsum(one_hot, 0)) * one_hot, 1) - 1
    place = element // TOP_K * (2 * TOP_K) + element % TOP_K
    weight = tl.load(received_weights + place + TOP_K, element < num_elements, other=0.0)
    tl.store(choice_rows + element, row, element < num_elements)
    tl.store(row_sources + row, element // TOP_K, row >= 0)
    tl.store(row_weights + row, weight, row >= 0)
    if tl.program_id(0) == 0:
        tl.store(row_offsets + column + 1, end, exists)
        tl.store(row_offsets + column, end - count, column == 0)
