"""Stage 2, layout: where every row goes. Ranks exchange counts once; all positions are computed on the device.

Letters: T tokens of this rank, k = top_k, W ranks, E experts, E_local = E / W experts of a rank.
A token travels once to every rank that holds any of its experts: S rows sent, U rows received.
R expert rows: one for each (received row, choice) pair of this rank's experts, grouped by expert.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
import triton
import triton.language as tl

from . import kernels
from .exchange import HostCopy, Peers, all_gather_counts, all_to_all_rows
from .route import Routes


@dataclass(frozen=True)
class Plan:
    """Everything the later stages and the backward pass need to know about one forward's routing.

    Attributes:
        peers: the expert-parallel group.
        num_tokens: T.
        counts: [W, E + W] int32 on the host; row r holds rank r's routes to each expert, then its rows for each rank.
        sent_tokens: [S] int32, the token in each sent row.
        choice_slots: [T, k] int32, the sent row that carries a choice, -1 for a dropped route.
        token_slots: [T, k] int32, ``choice_slots`` with every sent row named once a token and -1 elsewhere.
        choice_rows: [U, k] int32, the expert row of a received row's choice, -1 where the choice is not ours.
        row_choices: [R] int32, the inverse: received row * k + choice.
        row_weights: [R] float32, the router weight of each expert row.
        row_offsets: [E_local + 1] int32, where each local expert's rows start.
    """

    peers: Peers
    num_tokens: int
    counts: torch.Tensor
    sent_tokens: torch.Tensor
    choice_slots: torch.Tensor
    token_slots: torch.Tensor
    choice_rows: torch.Tensor
    row_choices: torch.Tensor
    row_weights: torch.Tensor
    row_offsets: torch.Tensor

    @property
    def top_k(self) -> int:
        return self.choice_slots.shape[1]

    @cached_property
    def send_splits(self) -> list[int]:
        """Rows sent to each rank."""
        return self.counts[self.peers.rank, -self.peers.size :].tolist()

    @cached_property
    def recv_splits(self) -> list[int]:
        """Rows received from each rank."""
        return self.counts[:, self.peers.rank - self.peers.size].tolist()

    @cached_property
    def expert_counts(self) -> list[int]:
        """Rows of each local expert."""
        by_expert = self.counts[:, : -self.peers.size].sum(0)
        return by_expert.chunk(self.peers.size)[self.peers.rank].tolist()

    @cached_property
    def expert_starts(self) -> list[int]:
        """Where each local expert's rows start, then R; ``row_offsets`` on the host."""
        return list(accumulate(self.expert_counts, initial=0))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor fields. Autograd functions save these, so that checkpointing frees and recomputes them too."""
        return tuple(getattr(self, name) for name in _TENSOR_FIELDS)

    def without_tensors(self) -> Plan:
        return replace(self, **dict.fromkeys(_TENSOR_FIELDS))

    def with_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Plan:
        return replace(self, **dict(zip(_TENSOR_FIELDS, tensors)))


_TENSOR_FIELDS = tuple(field.name for field in fields(Plan) if field.name not in ("peers", "num_tokens"))


def layout(routes: Routes, num_experts: int, peers: Peers) -> Plan:
    """Builds the :class:`Plan` of one forward; the only place where the host waits for the device.

    Args:
        routes: the router's choices for this rank's T tokens.
        num_experts: E, over all ranks.
        peers: the expert-parallel group.

    Raises:
        PeerError: a rank did not take part in the exchange of counts or routes.
    """
    experts = routes.experts
    num_tokens, top_k = experts.shape
    experts_per_rank = num_experts // peers.size
    leaders = leader_ranks(experts, experts_per_rank)
    positions, rank_offsets = bucket_positions(leaders.view(-1), peers.size)
    counts = torch.cat([bucket_counts(experts.view(-1), num_experts), rank_offsets.diff()])
    host_counts = HostCopy(all_gather_counts(counts, peers), peers)

    # Queued before the host waits: the device has work while the counts travel.
    token_slots = positions.view(num_tokens, top_k)
    choice_slots = shared_slots(token_slots, experts, experts_per_rank)
    sent_tokens = inverse(positions, min(top_k, peers.size) * num_tokens, top_k)

    plan = Plan(peers, num_tokens, host_counts.wait(), sent_tokens, choice_slots, token_slots, *[None] * 4)
    sent_tokens = sent_tokens[: sum(plan.send_splits)]
    sent = sent_routes(routes, sent_tokens, choice_slots, experts_per_rank)
    received = all_to_all_rows(sent, plan.send_splits, plan.recv_splits, peers, "layout")
    received_experts, received_weights = received[:, :top_k], received[:, top_k:].view(torch.float32)

    rows, row_offsets = bucket_positions(received_experts.reshape(-1), experts_per_rank)
    row_choices = inverse(rows, sum(plan.expert_counts))
    return replace(
        plan,
        sent_tokens=sent_tokens,
        choice_rows=rows.view(-1, top_k),
        row_choices=row_choices,
        row_weights=received_weights.reshape(-1)[row_choices],
        row_offsets=row_offsets,
    )


def leader_ranks(experts: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """The rank of each choice that is its token's first one there; -1 for the others and for dropped routes.

    Args:
        experts: [T, k] int32 global expert ids, -1 for a dropped route.

    Returns:
        [T, k] int32. With 2 experts a rank, ``[[0, 3, 1], [2, -1, 3]]`` gives ``[[0, 1, -1], [1, -1, -1]]``.
    """
    leaders = torch.empty_like(experts)
    if kernels.use_triton(experts) and experts.numel():
        _per_token(_leader_ranks_kernel, experts, leaders, experts_per_rank=experts_per_rank)
        return leaders
    ranks = torch.where(experts >= 0, experts // experts_per_rank, -1)
    same_before = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).tril(-1).any(2)
    return torch.where(same_before, -1, ranks)


def shared_slots(token_slots: torch.Tensor, experts: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """The sent row of every choice: choices of one token on one rank share the row of the first of them.

    Args:
        token_slots: [T, k] int32, the sent row of each first choice on a rank, -1 elsewhere.
        experts: [T, k] int32 global expert ids, -1 for a dropped route.

    Returns:
        [T, k] int32. With 2 experts a rank, experts ``[[0, 3, 1], [2, -1, 3]]`` and slots ``[[0, 1, -1], [2, -1, -1]]``
        give ``[[0, 1, 0], [2, -1, 2]]``.
    """
    slots = torch.empty_like(experts)
    if kernels.use_triton(experts) and experts.numel():
        _per_token(_shared_slots_kernel, experts, token_slots, slots, experts_per_rank=experts_per_rank)
        return slots
    ranks = torch.where(experts >= 0, experts // experts_per_rank, -1)
    same_rank = (ranks.unsqueeze(2) == ranks.unsqueeze(1)) & (ranks >= 0).unsqueeze(2)
    return torch.where(same_rank, token_slots.unsqueeze(1), -1).amax(2)


def bucket_counts(keys: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """How often each key occurs: [N] int32 keys in [-1, num_buckets) -> [num_buckets] int32; -1 is not counted."""
    if kernels.use_triton(keys) and keys.numel():
        return _count_blocks(keys, num_buckets)[1]
    return (keys.unsqueeze(1) == torch.arange(num_buckets, device=keys.device)).sum(0, dtype=torch.int32)


def bucket_positions(keys: torch.Tensor, num_buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A stable counting sort: where each key's element goes when elements are grouped by key.

    Args:
        keys: [N] int32 in [-1, num_buckets); elements with key -1 are left out.

    Returns:
        positions [N] int32 (-1 for those left out) and offsets [num_buckets + 1] int32, where each group starts.
        Keys ``[1, 0, -1, 1, 0]`` with 2 buckets give ``[2, 0, -1, 3, 1]`` and ``[0, 2, 4]``.
    """
    if kernels.use_triton(keys) and keys.numel():
        block_starts, counts = _count_blocks(keys, num_buckets)
        return _place_in_blocks(keys, block_starts, counts)
    one_hot = keys.unsqueeze(1) == torch.arange(num_buckets, device=keys.device)
    offsets = torch.nn.functional.pad(one_hot.sum(0).cumsum(0, dtype=torch.int32), (1, 0))
    places = one_hot.cumsum(0, dtype=torch.int32) - 1 + offsets[:-1]
    return torch.where(one_hot, places, -1).amax(1).int(), offsets


def inverse(positions: torch.Tensor, length: int, divisor: int = 1) -> torch.Tensor:
    """The element (divided by ``divisor``) that went to each position.

    Args:
        positions: [N] int32, distinct where not -1.
        length: positions that exist; one that nothing went to is left uninitialised.

    Returns:
        [length] int32. Positions ``[2, 0, -1, 3, 1]`` and length 4 give ``[1, 4, 0, 3]``.
    """
    elements = positions.new_empty(length)
    if kernels.use_triton(positions) and positions.numel():
        grid = (triton.cdiv(positions.numel(), 1024),)
        _inverse_kernel[grid](positions, elements, positions.numel(), divisor, BLOCK=1024)
        return elements
    taken = positions >= 0
    elements[positions[taken]] = taken.nonzero().squeeze(1).int() // divisor
    return elements


def sent_routes(
    routes: Routes, sent_tokens: torch.Tensor, choice_slots: torch.Tensor, experts_per_rank: int
) -> torch.Tensor:
    """What each sent row's receiver must know of it.

    Args:
        routes: the routes of T tokens.
        sent_tokens: [S] int32.
        choice_slots: [T, k] int32.

    Returns:
        [S, 2k] int32: the receiver's local expert of each choice (-1 where it is not the receiver's), then the bits
        of the choice's float32 router weight.
    """
    top_k = choice_slots.shape[1]
    num_sent = sent_tokens.numel()
    sent = sent_tokens.new_empty(num_sent, 2 * top_k)
    weights = routes.weights.detach().contiguous()
    if kernels.use_triton(sent_tokens) and num_sent:
        grid = (triton.cdiv(num_sent, 128),)
        _sent_routes_kernel[grid](
            routes.experts,
            weights.view(torch.int32),
            sent_tokens,
            choice_slots,
            sent,
            num_sent,
            experts_per_rank,
            TOP_K=top_k,
            BLOCK=128,
        )
        return sent
    slots = torch.arange(num_sent, device=sent.device).unsqueeze(1)
    theirs = choice_slots[sent_tokens] == slots
    sent[:, :top_k] = torch.where(theirs, routes.experts[sent_tokens] % experts_per_rank, -1)
    sent[:, top_k:] = weights.view(torch.int32)[sent_tokens]
    return sent


def _per_token(kernel, *tensors: torch.Tensor, experts_per_rank: int) -> None:
    num_tokens, top_k = tensors[0].shape
    kernel[(triton.cdiv(num_tokens, 128),)](*tensors, num_tokens, experts_per_rank, TOP_K=top_k, BLOCK=128)


def _count_blocks(keys: torch.Tensor, num_buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of keys and each bucket, the number of earlier keys in the bucket; and all keys of each bucket."""
    width = kernels.power_of_2(num_buckets)
    block = kernels.tile_rows(width)
    num_blocks = triton.cdiv(keys.numel(), block)
    block_starts = keys.new_empty(num_blocks, num_buckets)
    counts = keys.new_empty(num_buckets)
    _histogram_kernel[(num_blocks,)](keys, block_starts, keys.numel(), num_buckets, BLOCK=block, WIDTH=width)
    columns = min(width, 16)
    _scan_blocks_kernel[(triton.cdiv(num_buckets, columns),)](
        block_starts, counts, num_blocks, num_buckets, ROWS=256, COLUMNS=columns
    )
    return block_starts, counts


def _place_in_blocks(
    keys: torch.Tensor, block_starts: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, num_buckets = block_starts.shape
    width = kernels.power_of_2(num_buckets)
    positions = torch.empty_like(keys)
    offsets = keys.new_empty(num_buckets + 1)
    block = kernels.tile_rows(width)
    _positions_kernel[(num_blocks,)](
        keys, block_starts, counts, positions, offsets, keys.numel(), num_buckets, BLOCK=block, WIDTH=width
    )
    return positions, offsets


@triton.jit
def _rank_of(experts, offset, mask, experts_per_rank):
    expert = tl.load(experts + offset, mask, other=-1)
    return tl.where(expert >= 0, expert // experts_per_rank, -1)


@triton.jit
def _leader_ranks_kernel(experts, leaders, num_tokens, experts_per_rank, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    for j in range(TOP_K):
        rank = _rank_of(experts, token * TOP_K + j, mask, experts_per_rank)
        first = rank >= 0
        for i in range(j):
            first &= _rank_of(experts, token * TOP_K + i, mask, experts_per_rank) != rank
        tl.store(leaders + token * TOP_K + j, tl.where(first, rank, -1), mask)


@triton.jit
def _shared_slots_kernel(
    experts, token_slots, slots, num_tokens, experts_per_rank, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    for j in range(TOP_K):
        rank = _rank_of(experts, token * TOP_K + j, mask, experts_per_rank)
        slot = tl.full((BLOCK,), -1, tl.int32)
        for i in range(j + 1):
            same = (_rank_of(experts, token * TOP_K + i, mask, experts_per_rank) == rank) & (rank >= 0)
            candidate = tl.load(token_slots + token * TOP_K + i, mask, other=-1)
            slot = tl.where(same & (candidate >= 0), candidate, slot)
        tl.store(slots + token * TOP_K + j, slot, mask)


@triton.jit
def _one_hot(keys, num_keys, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + element, element < num_keys, other=-1)
    return element, (key[:, None] == tl.arange(0, WIDTH)[None, :]).to(tl.int32)


@triton.jit
def _histogram_kernel(keys, block_counts, num_keys, num_buckets, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    _, one_hot = _one_hot(keys, num_keys, BLOCK, WIDTH)
    bucket = tl.arange(0, WIDTH)
    tl.store(block_counts + tl.program_id(0) * num_buckets + bucket, tl.sum(one_hot, 0), bucket < num_buckets)


@triton.jit
def _scan_blocks_kernel(block_counts, counts, num_blocks, num_buckets, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replaces each column's counts by their exclusive sums and writes the column's total."""
    bucket = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        inside = (block < num_blocks)[:, None] & (bucket < num_buckets)[None, :]
        place = block_counts + block[:, None] * num_buckets + bucket[None, :]
        count = tl.load(place, inside, other=0)
        tl.store(place, before[None, :] + tl.cumsum(count, 0) - count, inside)
        before += tl.sum(count, 0)
    tl.store(counts + bucket, before, bucket < num_buckets)


@triton.jit
def _positions_kernel(
    keys,
    block_starts,
    counts,
    positions,
    offsets,
    num_keys,
    num_buckets,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    element, one_hot = _one_hot(keys, num_keys, BLOCK, WIDTH)
    bucket = tl.arange(0, WIDTH)
    exists = bucket < num_buckets
    count = tl.load(counts + bucket, exists, other=0)
    end = tl.cumsum(count, 0)
    first = end - count + tl.load(block_starts + tl.program_id(0) * num_buckets + bucket, exists, other=0)
    place = first[None, :] + tl.cumsum(one_hot, 0)
    tl.store(positions + element, tl.sum(place * one_hot, 1) - 1, element < num_keys)
    if tl.program_id(0) == 0:
        tl.store(offsets + bucket + 1, end, exists)
        tl.store(offsets + bucket, end - count, bucket == 0)


@triton.jit
def _inverse_kernel(positions, elements, num_elements, divisor, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + element, element < num_elements, other=-1)
    tl.store(elements + position, element // divisor, position >= 0)


@triton.jit
def _sent_routes_kernel(
    experts,
    weight_bits,
    sent_tokens,
    choice_slots,
    sent,
    num_sent,
    experts_per_rank,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < num_sent
    token = tl.load(sent_tokens + slot, mask, other=0)
    for j in range(TOP_K):
        theirs = tl.load(choice_slots + token * TOP_K + j, mask, other=-1) == slot
        expert = tl.load(experts + token * TOP_K + j, mask, other=0) % experts_per_rank
        tl.store(sent + slot * 2 * TOP_K + j, tl.where(theirs, expert, -1), mask)
        tl.store(sent + slot * 2 * TOP_K + TOP_K + j, tl.load(weight_bits + token * TOP_K + j, mask), mask)
