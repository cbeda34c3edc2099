"""Stage 2, layout, where ranks write into each other's memory: no collective, and one wait of the host for the counts.

The same :class:`~ds_tileoverlap.layout.Plan` as ``layout.layout`` makes; positions are computed by ``csrc/layout.cu``.
"""

from __future__ import annotations

from .config import TileOverlapConfig
from .exchange import WATCHDOG_MARGIN_S, Peers, peer_error
from .kernels import raw_stream
from .layout import Plan
from .overlap_group import NS, Group, check_failure
from .route import Routes
from .schedule import BAND, Returns

SEGMENT_BYTES = 2**21
# Sums return where they are so many times fewer than rows: adding up costs memory traffic, and starts later.
SUMS_BELOW = 0.6


def layout(
    routes: Routes,
    num_experts: int,
    peers: Peers,
    group: Group,
    config: TileOverlapConfig,
    row_bytes: int,
    can_overlap: bool,
) -> Plan:
    """As :func:`ds_tileoverlap.layout.layout`; the Plan also says how rows return.

    Args:
        row_bytes: of one hidden row.

    Raises:
        PeerError: the counts of a rank did not come.
    """
    op, pool = group.op, group.pool
    experts, weights = routes.experts, routes.weights.detach().contiguous()
    (num_tokens, top_k), size, rank = experts.shape, peers.size, peers.rank
    stream = raw_stream(experts)
    limit_ns = int(peers.timeout_s * NS)
    keys = num_experts + size
    row = keys + 1
    num_blocks = -(-num_tokens // op.BLOCK_TOKENS)
    block_counts, counts, bases = experts.new_empty(num_blocks * keys + size * row + 2 * keys + 1).split(
        [num_blocks * keys, size * row, 2 * keys + 1]
    )
    before = int(pool.host_ready)
    records = pool.records
    op.count(
        experts=experts.data_ptr(),
        num_tokens=num_tokens,
        num_choices=top_k,
        num_experts=num_experts,
        num_ranks=size,
        rank=rank,
        word=int(not can_overlap),
        block_counts=block_counts.data_ptr(),
        peer_counts=pool.peer_counts.data_ptr(),
        stride=pool.counts_stride,
        peer_ready=pool.peer_ready.data_ptr(),
        ready=pool.ready.data_ptr(),
        epoch=records.epoch.data_ptr(),
        targets=records.targets.data_ptr(),
        counts=counts.data_ptr(),
        bases=bases.data_ptr(),
        host_counts=pool.host_counts.data_ptr(),
        host_failure=pool.host_failure.data_ptr(),
        host_ready=pool.host_ready.data_ptr(),
        failure=pool.failure.data_ptr(),
        limit_ns=limit_ns,
        stream=stream,
    )
    choice_slots, token_slots, slots = experts.new_empty(3, num_tokens, top_k)
    limit_s = peers.timeout_s - WATCHDOG_MARGIN_S
    if not op.wait_for_change(word=pool.host_ready.data_ptr(), old_value=before & 0xFFFFFFFF, limit_s=limit_s):
        raise peer_error(peers, "layout", f"nothing came within {limit_s:.0f} s")
    check_failure(pool.host_failure, peers)
    plan = Plan(peers, pool.host_counts[: size * row].clone().view(size, row), counts.view(size, row), *[None] * 7)
    returns = choose_returns(config, plan, row_bytes)
    num_received, num_rows = sum(plan.recv_splits), sum(plan.expert_counts)
    sent_tokens = experts.new_empty(sum(plan.send_splits))
    record_bytes = -(-2 * top_k // 4) * 16
    most = max(map(sum, zip(*plan.sends.tolist()))) * record_bytes
    records.reserve(most, 2 * most)
    op.place(
        experts=experts.data_ptr(),
        weights=weights.data_ptr(),
        block_counts=block_counts.data_ptr(),
        bases=bases.data_ptr(),
        num_tokens=num_tokens,
        num_choices=top_k,
        num_experts=num_experts,
        num_ranks=size,
        rank=rank,
        returns_sums=returns.sums,
        sent_tokens=sent_tokens.data_ptr(),
        choice_slots=choice_slots.data_ptr(),
        token_slots=token_slots.data_ptr(),
        slots=slots.data_ptr(),
        limit_ns=limit_ns,
        stream=stream,
        **records.sending,
    )
    choice_rows = experts.new_empty(num_received, top_k)
    row_sources, row_offsets = experts.new_empty(num_rows), experts.new_empty(num_experts // size + 1)
    row_weights = weights.new_empty(num_rows)
    op.receive(
        num_received=num_received,
        num_choices=top_k,
        num_ranks=size,
        num_experts=num_experts,
        rank=rank,
        counts=counts.data_ptr(),
        choice_rows=choice_rows.data_ptr(),
        row_sources=row_sources.data_ptr(),
        row_weights=row_weights.data_ptr(),
        row_offsets=row_offsets.data_ptr(),
        limit_ns=limit_ns,
        stream=stream,
        **records.receiving,
    )
    return plan.but(
        sent_tokens=sent_tokens,
        choice_slots=choice_slots,
        token_slots=token_slots,
        choice_rows=choice_rows,
        row_sources=row_sources,
        row_weights=row_weights,
        row_offsets=row_offsets,
        returns=returns,
        slots=slots,
    )


def choose_returns(config: TileOverlapConfig, plan: Plan, row_bytes: int) -> Returns:
    """How rows come home: from the exchanged counts, so that all ranks choose alike."""
    num_routes, num_sends = sum(map(sum, plan.remote_routes)), sum(map(sum, plan.remote_sends))
    sums = num_sends < SUMS_BELOW * num_routes if config.combine == "auto" else config.combine == "sums"
    bands = config.bands_per_segment
    if bands == "auto":
        bands = max(1, SEGMENT_BYTES // (BAND * row_bytes))
    return Returns(sums, config.owner_alignment == "tile", bands, num_panels=2 if sums else 1)


def rows_to_receive(plan: Plan) -> tuple[int, int]:
    """The most rows that any rank of the group receives now, and that it could from as many tokens."""
    remote = plan.remote_sends if plan.returns.sums else plan.remote_routes
    return max(map(sum, remote)), max(map(sum, plan.routes_between))
