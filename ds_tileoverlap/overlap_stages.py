"""The two fused stages of the overlap backend, each one kernel and what it needs: rows that arrive are multiplied, and
rows that are made return.

    project_arriving        dispatch => expert_gemm     couriers send this rank's tokens; tiles of rows from others wait
    return_while_computed   expert_gemm => combine      couriers carry finished tiles home, as rows or as sums
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .buffer import Channel
from .config import TileOverlapConfig
from .layout import Plan
from .overlap_group import NS, Group
from .schedule import TILE_N, Returns, Schedule, tile_schedule
from .stages import Stages
from .symmetric_layout import rows_to_receive
from .weight_maps import WeightMaps


class Run:
    """What the kernels of one layer's forward and backward need beside its tensors."""

    def __init__(self, group: Group, config: TileOverlapConfig, maps: WeightMaps):
        self.group, self.op, self.pool, self._maps = group, group.op, group.pool, maps
        self.comm_sms = 0 if config.comm_sms == "auto" else config.comm_sms
        self.overlaps_dispatch, self.overlaps_backward = config.overlap_dispatch, config.overlap_backward

    def maps(self, operand: Operand, dtype: torch.dtype) -> torch.Tensor:
        """The table through which the GEMM reads the operand."""
        return self._maps.of(self.op, operand.name, operand.stack, dtype, operand.transposed)


@dataclass(frozen=True)
class Operand:
    """The weights of one projection as the GEMM reads them.

    Attributes:
        name: distinguishes the layer's tables.
        stack: (first expert, end, view [n, rows, columns]) for each run of the local experts.
        transposed: whether the GEMM sums over the rows of a weight instead of its columns.
    """

    name: str
    stack: list[tuple[int, int, torch.Tensor]]
    transposed: bool

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.stack[0][2].shape[2 if self.transposed else 1]


def project_arriving(
    tokens: torch.Tensor, operands: list[Operand], plan: Plan, run: Run, keep: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sends this rank's tokens to their experts and multiplies what arrives, this rank's own rows first.

    Args:
        tokens: [T, K], contiguous.
        keep: whether the rows that arrived are wanted.

    Returns:
        For each operand [R, its width], and the rows from other ranks [.., K], grouped by rank (none if not wanted).
    """
    channel = run.pool.tokens
    # Couriers and the GEMM read 16 bytes at a time; a view may begin anywhere.
    tokens = tokens if tokens.data_ptr() % 16 == 0 else tokens.clone()
    row_bytes = tokens.shape[1] * tokens.element_size()
    arriving = plan.remote_sends.sum(0)
    channel.reserve(int(arriving.max()) * row_bytes, 2 * int(arriving.max()) * row_bytes)
    kept = tokens.new_empty(int(arriving[plan.peers.rank]) if keep else 0, tokens.shape[1])
    results = []
    begin(run, channel, plan, run.op.TOKENS_OUT, row_bytes)
    for i, operand in enumerate(operands):
        tiles = tile_schedule(run.group, plan, operand.width, row_bytes, ARRIVALS, local_first=True)
        # The first operand's kernel sends this rank's tokens; the next ones find everything in place.
        courier = token_courier(run, plan, tiles, tokens, row_bytes) if i == 0 else run.op.Courier()
        if i == 0 and not run.overlaps_dispatch:
            is_half, stream = tokens.dtype == torch.float16, current_stream(tokens).cuda_stream
            run.op.run_couriers(courier=courier, is_half=is_half, num_sms=run.group.num_sms, stream=stream)
            courier = run.op.Courier()
        rows = tokens.new_empty(plan.row_sources.numel(), operand.width)
        gather = gather_of(run, plan, tokens)
        multiply(run, tiles, rows, run.maps(operand, tokens.dtype), tokens.shape[1], courier, operand, gather=gather)
        results.append(rows)
    run.op.keep_rows(
        received=channel.received,
        generation_bytes=channel.capacity_bytes,
        epoch=channel.epoch.data_ptr(),
        kept=kept.data_ptr(),
        num_bytes=kept.numel() * kept.element_size(),
        peer_consumed=channel.peer_consumed.data_ptr(),
        finished=channel.finished.data_ptr(),
        num_peers=plan.peers.size,
        num_sms=run.group.num_sms,
        stream=current_stream(tokens).cuda_stream,
    )
    return results, kept


def current_stream(tensor: torch.Tensor) -> torch.cuda.Stream:
    return torch.cuda.current_stream(tensor.device)


# How tokens go out: whole rows, packed, in one panel.
ARRIVALS = Returns(sums=True, aligns_owners=False, bands_per_segment=1, num_panels=1)


def begin(run: Run, channel: Channel, plan: Plan, what: int, row_bytes: int) -> None:
    """Starts a use of a channel: the next epoch, and how much must come from each peer."""
    run.op.begin_return(
        counts=plan.device_counts.data_ptr(),
        counts_stride=plan.device_counts.shape[1],
        num_ranks=plan.peers.size,
        rank=plan.peers.rank,
        num_experts=plan.num_experts,
        what=what,
        row_bytes=row_bytes,
        epoch=channel.epoch.data_ptr(),
        targets=channel.targets.data_ptr(),
        stream=current_stream(plan.device_counts).cuda_stream,
    )


def courier_of(run: Run, channel: Channel, plan: Plan, tiles: Schedule, rows: torch.Tensor, row_bytes: int, **errand):
    """A courier's instructions: what is common to all errands, and ``errand``."""
    return run.op.Courier(
        rows=rows.data_ptr(),
        row_bytes=row_bytes,
        num_peers=plan.peers.size,
        rank=plan.peers.rank,
        segments=tiles.segments.data_ptr(),
        num_segments=tiles.num_segments.data_ptr(),
        panel_targets=tiles.panel_targets.data_ptr(),
        peer_buffers=channel.peer_buffers.data_ptr(),
        peer_arrived=channel.peer_arrived.data_ptr(),
        peer_consumed=channel.consumed.data_ptr(),
        generation_bytes=channel.capacity_bytes,
        epoch=channel.epoch.data_ptr(),
        claimed=channel.claimed.data_ptr(),
        failure=run.pool.failure.data_ptr(),
        limit_ns=int(plan.peers.timeout_s * NS),
        **errand,
    )


def token_courier(run: Run, plan: Plan, tiles: Schedule, tokens: torch.Tensor, row_bytes: int):
    """Tokens [T, H] to every rank that holds any of their experts, at once: nothing has to be computed before."""
    return courier_of(
        run,
        run.pool.tokens,
        plan,
        tiles,
        tokens,
        row_bytes,
        errand=run.op.RETURN_SUMS,
        signals=0,
        signals_per_band=0,
        index=plan.sent_tokens.data_ptr(),
        num_choices=1,
        sum_runs=tiles.send_runs.data_ptr(),
        panel_done=0,
        num_panels=1,
        panel_bytes=row_bytes,
    )


def output_courier(run: Run, plan: Plan, tiles: Schedule, outputs: torch.Tensor, row_bytes: int):
    """Expert outputs [R, H] to the owners of their tokens, as soon as the tiles that they lie in are ready."""
    pool, returns = run.pool, plan.returns
    element = outputs.element_size()
    return courier_of(
        run,
        pool.returns,
        plan,
        tiles,
        outputs,
        row_bytes,
        errand=run.op.RETURN_SUMS if returns.sums else run.op.RETURN_ROWS,
        signals=pool.signals.data_ptr(),
        signals_per_band=2 * -(-outputs.shape[1] // TILE_N),
        index=plan.choice_rows.data_ptr(),
        num_choices=plan.top_k,
        sum_runs=tiles.sum_runs.data_ptr(),
        panel_done=pool.panel_done.data_ptr(),
        num_panels=returns.num_panels,
        panel_bytes=returns.panel_tiles(outputs.shape[1]) * TILE_N * element,
    )


def gather_of(run: Run, plan: Plan, tokens: torch.Tensor):
    """Where the rows of operand A lie: tokens [T, K] of this rank, and those that arrive from others."""
    channel, peers = run.pool.tokens, plan.peers
    own_first, own_sent = sum(plan.recv_splits[: peers.rank]), sum(plan.send_splits[: peers.rank])
    return run.op.Gather(
        sources=plan.row_sources.data_ptr(),
        own_first=own_first,
        own_end=own_first + plan.recv_splits[peers.rank],
        own_tokens=plan.sent_tokens.data_ptr() + 4 * own_sent,
        tokens=tokens.data_ptr(),
        received=channel.received,
        generation_bytes=channel.capacity_bytes,
        arrived=channel.arrived.data_ptr(),
        targets=channel.targets.data_ptr(),
        epoch=channel.epoch.data_ptr(),
        num_peers=peers.size,
        failure=run.pool.failure.data_ptr(),
        limit_ns=int(peers.timeout_s * NS),
    )


def multiply(
    run: Run,
    tiles: Schedule,
    result: torch.Tensor,
    maps: torch.Tensor,
    inner: int,
    courier,
    operand: Operand,
    **options,
) -> None:
    """The expert GEMM: result [R, N] = rows [R, inner] times ``operand``, by the items of ``tiles``.

    Args:
        options: ``a`` or ``gather``, where the rows lie; a second pair of operands; what is announced; the SMs.
    """
    defaults = dict(a=0, gather=run.op.Gather(), num_sms=run.group.num_sms, signals=0, panel_done=0, panel_tiles=1)
    run.op.expert_gemm(
        b_maps=maps.data_ptr(),
        c=result.data_ptr(),
        items=tiles.items.data_ptr(),
        num_items=tiles.num_items.data_ptr(),
        claimed=run.pool.claimed_items.data_ptr(),
        epoch=run.pool.returns.epoch.data_ptr(),
        num_rows=result.shape[0],
        n=result.shape[1],
        k=inner,
        is_half=result.dtype == torch.float16,
        b_is_transposed=operand.transposed,
        courier=courier,
        stream=current_stream(result).cuda_stream,
        **{**defaults, **options},
    )


def return_tiles(width: int, dtype: torch.dtype, plan: Plan, run: Run) -> Schedule:
    """The tiles of a GEMM with ``width`` columns whose rows return, and room for what comes back."""
    row_bytes = width * dtype.itemsize
    tiles = tile_schedule(run.group, plan, width, row_bytes, plan.returns)
    run.pool.returns.reserve(*(count * row_bytes for count in rows_to_receive(plan)))
    run.pool.reserve_signals(tiles.num_bands * -(-width // TILE_N) * 2)
    return tiles


def return_while_computed(
    pairs: list[tuple[torch.Tensor, Operand]],
    tiles: Schedule,
    plan: Plan,
    run: Run,
    stages: Stages,
    meanwhile: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Rows times their experts' weights, summed at the owners of their tokens.

    The couriers are warps of the GEMM, or run beside it on SMs of their own; the sum follows.

    Args:
        pairs: one or two of rows [R, K] and weights, whose products are added.
        tiles: of :func:`return_tiles`.
        meanwhile: queues work that runs while the last rows are on their way.

    Returns:
        [T, width].
    """
    op, pool, returns, comm_sms = run.op, run.pool, plan.returns, run.comm_sms
    channel = pool.returns
    (rows, operand), *others = pairs
    width, is_half, main = operand.width, rows.dtype == torch.float16, current_stream(rows)
    row_bytes = width * rows.element_size()
    outputs = rows.new_empty(rows.shape[0], width)
    sums = rows.new_empty(plan.slots.shape[0], width)
    courier = output_courier(run, plan, tiles, outputs, row_bytes)
    second = {}
    for other, its_operand in others:
        maps = run.maps(its_operand, rows.dtype)
        second = dict(a2=other.data_ptr(), b2_maps=maps.data_ptr(), k2=other.shape[1])
    with stages("expert_gemm"):
        begin(run, channel, plan, op.SUMS_HOME if returns.sums else op.ROWS_HOME, row_bytes)
        if comm_sms:
            pool.forked.record(main)
        # The GEMM first: it waits for nobody, so whatever happens to the couriers' start, nothing is held up.
        multiply(
            run,
            tiles,
            outputs,
            run.maps(operand, rows.dtype),
            rows.shape[1],
            op.Courier() if comm_sms else courier,
            operand,
            a=rows.data_ptr(),
            num_sms=run.group.num_sms - comm_sms,
            signals=0 if returns.sums else pool.signals.data_ptr(),
            panel_done=pool.panel_done.data_ptr() if returns.sums else 0,
            panel_tiles=returns.panel_tiles(width),
            **second,
        )
        if comm_sms:
            pool.stream.wait_event(pool.forked)
            op.run_couriers(courier=courier, is_half=is_half, num_sms=comm_sms, stream=pool.stream.cuda_stream)
            pool.joined.record(pool.stream)
    meanwhile()
    with stages("combine"):
        if comm_sms:
            main.wait_event(pool.joined)
        op.sum_slots(
            received=channel.received,
            local=outputs.data_ptr(),
            slots=plan.slots.data_ptr(),
            sums=sums.data_ptr(),
            arrived=channel.arrived.data_ptr(),
            targets=channel.targets.data_ptr(),
            epoch=channel.epoch.data_ptr(),
            peer_consumed=channel.peer_consumed.data_ptr(),
            finished=channel.finished.data_ptr(),
            failure=pool.failure.data_ptr(),
            generation_bytes=channel.capacity_bytes,
            limit_ns=int(plan.peers.timeout_s * NS),
            num_tokens=sums.shape[0],
            num_choices=plan.slots.shape[1],
            width=width,
            num_peers=plan.peers.size,
            is_half=is_half,
            num_sms=run.group.num_sms,
            stream=main.cuda_stream,
        )
    return sums


def scalar_return(values: torch.Tensor, tiles: Schedule, plan: Plan, run: Run) -> dict[str, int]:
    """Arguments of the operator's ``scalars``: one float32 a row [R] to the owners of the rows' tokens [T, k]."""
    peers, channel = plan.peers, run.pool.scalars
    record_bytes = -(-plan.top_k // 4) * 16
    most = int(plan.remote_sends.sum(1).max()) * record_bytes
    channel.reserve(most, 2 * most)
    own_first = sum(plan.send_splits[: peers.rank])
    return dict(
        values=values.data_ptr(),
        index=plan.choice_rows.data_ptr(),
        sum_runs=tiles.sum_runs.data_ptr(),
        choice_slots=plan.choice_slots.data_ptr(),
        slots=plan.slots.data_ptr(),
        own_first=own_first,
        own_end=own_first + plan.send_splits[peers.rank],
        results=0,
        num_tokens=plan.slots.shape[0],
        num_choices=plan.top_k,
        num_peers=peers.size,
        rank=peers.rank,
        counts=plan.device_counts.data_ptr(),
        counts_stride=plan.device_counts.shape[1],
        num_experts=plan.num_experts,
        epoch=channel.epoch.data_ptr(),
        targets=channel.targets.data_ptr(),
        received=channel.received,
        generation_bytes=channel.capacity_bytes,
        arrived=channel.arrived.data_ptr(),
        consumed=channel.consumed.data_ptr(),
        peer_buffers=channel.peer_buffers.data_ptr(),
        peer_arrived=channel.peer_arrived.data_ptr(),
        peer_consumed=channel.peer_consumed.data_ptr(),
        finished=channel.finished.data_ptr(),
        failure=run.pool.failure.data_ptr(),
        limit_ns=int(peers.timeout_s * NS),
        stream=current_stream(values).cuda_stream,
    )
