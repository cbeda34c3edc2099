"""The two fused stages of the overlap backend, each one kernel and what it needs: rows that arrive are multiplied, and
rows that are made return.

    project_arriving        dispatch => expert_gemm     couriers send this rank's tokens and put in place what arrives
    return_while_computed   expert_gemm => combine      couriers carry finished tiles home, as rows or as sums
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .activation import Activation
from .buffer import Channel
from .config import TileOverlapConfig
from .dispatch import place_own_rows
from .exchange import Peers
from .kernels import raw_stream
from .layout import Plan
from .overlap_group import NS, Group
from .schedule import ARRIVALS, TILE_N, Returns, Schedule, gated_width, schedules
from .stages import Stages
from .symmetric_layout import rows_to_receive
from .weight_maps import WeightMaps


class Run:
    """What the kernels of one layer's forward and backward need beside its tensors.

    Args:
        row_bytes: of a hidden row.
    """

    def __init__(self, group: Group, config: TileOverlapConfig, maps: WeightMaps, peers: Peers, row_bytes: int):
        self.group, self.op, self.pool, self.row_bytes = group, group.op, group.pool, row_bytes
        self._maps = maps
        self._schedules: dict[tuple[int, Returns], Schedule] = {}
        self.comm_sms = group.comm_sms if config.comm_sms == "auto" else config.comm_sms
        self.overlaps_dispatch, self.overlaps_backward = config.overlap_dispatch, config.overlap_backward
        self.limit_ns = int(peers.timeout_s * NS)

    def maps(self, operand: Operand, dtype: torch.dtype) -> torch.Tensor:
        """The table through which the GEMM reads the operand."""
        return self._maps.of(self.op, operand.name, operand.stack, dtype, operand.transposed)

    def room(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory of the layer for an operand that is made anew in every forward; see :meth:`WeightMaps.room`."""
        return self._maps.room(name, shape, like)

    def prepare(self, plan: Plan, gemms: set[tuple[int, Returns]]) -> None:
        """Computes the schedules of GEMMs with so many columns whose rows return so, all at once."""
        ordered = sorted(gemms, key=lambda gemm: (gemm[1].local_first, gemm[0]))
        found = schedules(self.op, plan, [(n, self.row_bytes, returns) for n, returns in ordered])
        self._schedules = dict(zip(ordered, found))

    def tiles(self, n: int, returns: Returns) -> Schedule:
        return self._schedules[n, returns]


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
    tokens: torch.Tensor, operands: list[Operand], plan: Plan, run: Run
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sends this rank's tokens to their experts and multiplies what arrives, this rank's own rows first.

    Args:
        tokens: [T, K], contiguous.

    Returns:
        For each operand [R, its width], and the expert rows [R, K].
    """
    rows, carried = _rows_and_couriers(tokens, operands[0].width, plan, run)
    results = []
    for operand in operands:
        result = tokens.new_empty(rows.shape[0], operand.width)
        multiply(run, run.tiles(operand.width, ARRIVALS), [(rows, operand)], result, **carried)
        results.append(result)
        # The first operand's kernel sends and receives; the next ones find everything in place.
        carried = {}
    return results, rows


def project_gated_arriving(
    tokens: torch.Tensor,
    gate: Operand,
    up: Operand,
    into: tuple[torch.Tensor, torch.Tensor],
    act: Activation,
    plan: Plan,
    run: Run,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`project_arriving` with gate and up, and with the hidden rows of both, in one kernel.

    Args:
        into: where the gate's and up's results [R, I] go; rows may be strided, alike.
        act: a form of silu.

    Returns:
        The weighted hidden rows [R, I], and the expert rows [R, K].
    """
    width = gated_width(gate.width)
    rows, carried = _rows_and_couriers(tokens, width, plan, run)
    hidden = tokens.new_empty(rows.shape[0], gate.width)
    multiply(
        run,
        run.tiles(width, ARRIVALS),
        [(rows, gate)],
        into[0],
        up_maps=run.maps(up, rows.dtype).data_ptr(),
        up=into[1].data_ptr(),
        stride=into[1].stride(0),
        hidden=hidden.data_ptr(),
        row_weights=plan.row_weights.data_ptr(),
        alpha=act.alpha,
        limit=act.limit,
        shift=act.shift,
        **carried,
    )
    return hidden, rows


def arrived_rows(tokens: torch.Tensor, width: int, plan: Plan, run: Run) -> torch.Tensor:
    """The expert rows [R, K] alone.

    Args:
        width: of a schedule for :data:`ARRIVALS`.
    """
    rows, carried = _arriving_rows(tokens, width, plan, run)
    _carry(rows, run, carried)
    return rows


def _rows_and_couriers(tokens: torch.Tensor, width: int, plan: Plan, run: Run) -> tuple[torch.Tensor, dict]:
    """The expert rows [R, K], all of them where dispatch does not overlap, and what the GEMM carries otherwise."""
    rows, carried = _arriving_rows(tokens, width, plan, run)
    if run.overlaps_dispatch:
        return rows, carried
    _carry(rows, run, carried)
    return rows, {}


def _arriving_rows(tokens: torch.Tensor, width: int, plan: Plan, run: Run) -> tuple[torch.Tensor, dict]:
    """The expert rows [R, K] with this rank's own in place, and the couriers' instructions for all others."""
    channel = run.pool.tokens
    # Couriers read 16 bytes at a time; a view may begin anywhere.
    tokens = tokens if tokens.data_ptr() % 16 == 0 else tokens.clone()
    arriving = max(map(sum, zip(*plan.remote_sends))) * run.row_bytes
    channel.reserve(arriving, 2 * arriving)
    rows = tokens.new_empty(plan.row_sources.numel(), tokens.shape[1])
    place_own_rows(tokens, plan, rows)
    tiles = run.tiles(width, ARRIVALS)
    missing = begin(run, channel, plan, run.op.TOKENS_OUT, run.row_bytes, tiles.band_parts)
    courier, arrivals = token_courier(run, plan, tiles, tokens), arrivals_of(run, plan, tiles, rows, missing)
    return rows, dict(courier=courier, arrivals=arrivals)


def _carry(rows: torch.Tensor, run: Run, carried: dict) -> None:
    """Couriers on all SMs, with no GEMM beside them."""
    is_half = rows.dtype == torch.float16
    run.op.run_couriers(**carried, is_half=is_half, num_sms=run.group.num_sms, stream=raw_stream(rows))


def begin(
    run: Run, channel: Channel, plan: Plan, what: int, row_bytes: int, to_do: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Starts a use of a channel: the next epoch, and how much must come from each peer.

    Tokens go out only when every rank of the group is about to send them: a kernel that waits for them fills the GPU,
    and a rank that is late may still need a collective that could not start beside it.

    Returns:
        Counters that show ``to_do`` [n] at first, and may be longer.
    """
    left, counters = None, {}
    if to_do is not None:
        left = run.pool.reserve_left(to_do.numel())
        counters = dict(to_do=to_do.data_ptr(), left=left.data_ptr(), num_left=to_do.numel())
    run.op.begin(
        counts=plan.device_counts.data_ptr(),
        counts_stride=plan.device_counts.shape[1],
        num_ranks=plan.peers.size,
        rank=plan.peers.rank,
        num_experts=plan.num_experts,
        what=what,
        row_bytes=row_bytes,
        epoch=channel.epoch.data_ptr(),
        targets=channel.targets.data_ptr(),
        peer_began=channel.peer_began.data_ptr(),
        began=channel.began.data_ptr() if what == run.op.TOKENS_OUT else 0,
        failure=run.pool.failure.data_ptr(),
        limit_ns=run.limit_ns,
        stream=raw_stream(plan.device_counts),
        **counters,
    )
    return left


def courier_of(run: Run, channel: Channel, plan: Plan, tiles: Schedule, rows: torch.Tensor, **errand):
    """A courier's instructions: what is common to all errands, and ``errand``."""
    return run.op.Courier(
        rows=rows.data_ptr(),
        row_bytes=run.row_bytes,
        num_peers=plan.peers.size,
        rank=plan.peers.rank,
        segments=tiles.segments.data_ptr(),
        num_segments=tiles.num_segments.data_ptr(),
        claimed=channel.claimed.data_ptr(),
        limit_ns=run.limit_ns,
        **channel.sending,
        **errand,
    )


def token_courier(run: Run, plan: Plan, tiles: Schedule, tokens: torch.Tensor):
    """Tokens [T, H] to every rank that holds any of their experts, at once: nothing has to be computed before."""
    return courier_of(
        run,
        run.pool.tokens,
        plan,
        tiles,
        tokens,
        errand=run.op.RETURN_SUMS,
        index=plan.sent_tokens.data_ptr(),
        num_choices=1,
        runs=tiles.send_runs.data_ptr(),
        num_panels=1,
        panel_bytes=run.row_bytes,
    )


def output_courier(run: Run, plan: Plan, tiles: Schedule, outputs: torch.Tensor, left: torch.Tensor):
    """Expert outputs [R, H] to the owners of their tokens, as soon as the tiles that they lie in are ready."""
    returns = plan.returns
    waits = (
        dict(errand=run.op.RETURN_SUMS, panel_left=left.data_ptr())
        if returns.sums
        else dict(
            errand=run.op.RETURN_ROWS,
            signals=run.pool.signals.data_ptr(),
            signals_per_band=2 * -(-outputs.shape[1] // TILE_N),
        )
    )
    return courier_of(
        run,
        run.pool.returns,
        plan,
        tiles,
        outputs,
        index=plan.choice_rows.data_ptr(),
        num_choices=plan.top_k,
        runs=tiles.sum_runs.data_ptr(),
        num_panels=returns.num_panels,
        panel_bytes=returns.panel_tiles(outputs.shape[1]) * TILE_N * outputs.element_size(),
        **waits,
    )


def arrivals_of(run: Run, plan: Plan, tiles: Schedule, rows: torch.Tensor, missing: torch.Tensor):
    """What arrives from peers is copied to its places among the expert rows [R, K]."""
    channel = run.pool.tokens
    return run.op.Arrivals(
        rows=rows.data_ptr(),
        row_bytes=run.row_bytes,
        sources=plan.row_sources.data_ptr(),
        own_first=plan.own_received.start,
        own_end=plan.own_received.stop,
        segments=tiles.segments.data_ptr(),
        num_segments=tiles.num_segments.data_ptr(),
        missing=missing.data_ptr(),
        claimed=channel.placed.data_ptr(),
        num_peers=plan.peers.size,
        limit_ns=run.limit_ns,
        **channel.receiving,
    )


def multiply(
    run: Run,
    tiles: Schedule,
    pairs: list[tuple[torch.Tensor, Operand]],
    result: torch.Tensor,
    **options,
) -> None:
    """The expert GEMM: result [R, N], the sum over one or two pairs of rows [R, K] times weights.

    Args:
        tiles: which tiles it makes in which order.
        options: what it carries, what it announces, the SMs that it takes.
    """
    (rows, operand), *second = pairs
    for other, its_operand in second:
        maps = run.maps(its_operand, rows.dtype)
        options.update(a2=other.data_ptr(), b2_maps=maps.data_ptr(), k2=other.shape[1])
    run.op.expert_gemm(
        a=rows.data_ptr(),
        b_maps=run.maps(operand, rows.dtype).data_ptr(),
        c=result.data_ptr(),
        items=tiles.items.data_ptr(),
        num_items=tiles.num_items.data_ptr(),
        claimed=run.pool.claimed_items.data_ptr(),
        num_rows=result.shape[0],
        n=result.shape[1],
        k=rows.shape[1],
        is_half=result.dtype == torch.float16,
        b_is_transposed=operand.transposed,
        stream=raw_stream(result),
        **{"num_sms": run.group.num_sms, **options},
    )


def return_while_computed(
    pairs: list[tuple[torch.Tensor, Operand]],
    plan: Plan,
    run: Run,
    stages: Stages,
    meanwhile: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Rows times their experts' weights, summed at the owners of their tokens.

    The couriers are warps of the GEMM, or run beside it on SMs of their own; the sum follows.

    Args:
        pairs: one or two of rows [R, K] and weights, whose products are added.
        meanwhile: queues work that runs while the last rows are on their way.

    Returns:
        [T, width].
    """
    op, pool, returns, comm_sms = run.op, run.pool, plan.returns, run.comm_sms
    channel, (rows, operand) = pool.returns, pairs[0]
    width, is_half = operand.width, rows.dtype == torch.float16
    main = torch.cuda.current_stream(rows.device) if comm_sms else None
    tiles = run.tiles(width, returns)
    channel.reserve(*(count * run.row_bytes for count in rows_to_receive(plan)))
    pool.reserve_signals(tiles.num_bands * -(-width // TILE_N) * 2)
    outputs = rows.new_empty(rows.shape[0], width)
    sums = rows.new_empty(plan.slots.shape[0], width)
    with stages("expert_gemm"):
        what = op.SUMS_HOME if returns.sums else op.ROWS_HOME
        left = begin(run, channel, plan, what, run.row_bytes, tiles.panel_tiles)
        announced = (
            dict(panel_left=left.data_ptr(), panel_tiles=returns.panel_tiles(width))
            if returns.sums
            else dict(signals=pool.signals.data_ptr(), epoch=channel.epoch.data_ptr())
        )
        courier = output_courier(run, plan, tiles, outputs, left)
        if comm_sms:
            pool.forked.record(main)
        # The GEMM first: it waits for nobody, so whatever happens to the couriers' start, nothing is held up.
        carried = {} if comm_sms else {"courier": courier}
        multiply(run, tiles, pairs, outputs, num_sms=run.group.num_sms - comm_sms, **announced, **carried)
        if comm_sms:
            pool.stream.wait_event(pool.forked)
            op.run_couriers(courier=courier, is_half=is_half, num_sms=comm_sms, stream=pool.stream.cuda_stream)
            pool.joined.record(pool.stream)
    meanwhile()
    with stages("combine"):
        if comm_sms:
            main.wait_event(pool.joined)
        op.sum_slots(
            local=outputs.data_ptr(),
            slots=plan.slots.data_ptr(),
            sums=sums.data_ptr(),
            num_tokens=sums.shape[0],
            num_choices=plan.slots.shape[1],
            width=width,
            num_peers=plan.peers.size,
            is_half=is_half,
            num_sms=run.group.num_sms,
            limit_ns=run.limit_ns,
            stream=raw_stream(rows),
            **channel.receiving,
        )
    return sums


class ScalarReturn:
    """One float32 a row [R] goes to the owners of the rows' tokens: sent at once, collected later.

    Args:
        tiles: any schedule of this Plan.
    """

    def __init__(self, values: torch.Tensor, tiles: Schedule, plan: Plan, run: Run):
        channel, record_bytes = run.pool.scalars, -(-plan.top_k // 4) * 16
        most = max(map(sum, plan.remote_sends)) * record_bytes
        channel.reserve(most, 2 * most)
        self._run, self._like = run, plan.slots
        self._arguments = dict(
            values=values.data_ptr(),
            index=plan.choice_rows.data_ptr(),
            runs=tiles.sum_runs.data_ptr(),
            choice_slots=plan.choice_slots.data_ptr(),
            slots=plan.slots.data_ptr(),
            own_first=plan.own_sent.start,
            own_end=plan.own_sent.stop,
            num_tokens=plan.slots.shape[0],
            num_choices=plan.top_k,
            num_peers=plan.peers.size,
            limit_ns=run.limit_ns,
            stream=raw_stream(values),
            **{**channel.sending, **channel.receiving},
        )
        # What the addresses belong to.
        self._kept = values, tiles, plan
        begin(run, channel, plan, run.op.SUMS_HOME, record_bytes)
        run.op.send_scalars(**self._arguments)

    def collect(self) -> torch.Tensor:
        """The scalars of each token's choices [T, k] float32, 0 for a dropped one."""
        results = torch.empty_like(self._like, dtype=torch.float32)
        self._run.op.collect_scalars(**self._arguments, results=results.data_ptr())
        return results
