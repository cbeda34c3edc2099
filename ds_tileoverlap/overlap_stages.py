"""The two fused stages of the overlap backend, each one kernel and what it needs: rows that arrive are multiplied, and
rows that are made return.

    project_arriving        dispatch => expert_gemm     couriers send this rank's tokens and put in place what arrives
    return_while_computed   expert_gemm => combine      couriers carry finished tiles home, as rows or as sums
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .activation import Activation
from .buffer import scalar_bytes
from .config import TileOverlapConfig
from .dispatch import place_own_rows
from .kernels import raw_stream
from .layout import Plan
from .overlap_group import Group
from .schedule import ARRIVALS, TILE_N, Returns, Schedule, gated_width, schedules
from .stages import Stages
from .symmetric_layout import exchange_of, rows_to_receive
from .weight_maps import WeightMaps


class Run:
    """What the stages of one layer's forward and backward need beside its tensors.

    Args:
        counts: [W, E + W + 1] on the device, whose address ``exchange`` knows.
        exchange: of this forward, as the operator takes it.
        schedules: by columns of the GEMM and the way that its rows return.
        row_bytes: of a hidden row.
    """

    def __init__(
        self,
        group: Group,
        config: TileOverlapConfig,
        maps: WeightMaps,
        counts: torch.Tensor,
        exchange,
        schedules: Mapping[tuple[int, Returns], Schedule],
        row_bytes: int,
    ):
        self.op, self.pool, self.exchange, self.row_bytes = group.op, group.pool, exchange, row_bytes
        self._counts, self._schedules, self._maps = counts, schedules, maps
        self.comm_sms = group.comm_sms if config.comm_sms == "auto" else config.comm_sms
        self.overlaps_dispatch, self.overlaps_backward = config.overlap_dispatch, config.overlap_backward

    def maps(self, operand: Operand, dtype: torch.dtype) -> torch.Tensor:
        """The table through which the GEMM reads the operand."""
        return self._maps.of(self.op, operand.name, operand.stack, dtype, operand.transposed)

    def room(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory of the layer for an operand that is made anew in every forward; see :meth:`WeightMaps.room`."""
        return self._maps.room(name, shape, like)

    def tiles(self, n: int, returns: Returns):
        """The schedule of a GEMM with so many columns whose rows return so, as the operator takes it."""
        return self._schedules[n, returns].native


def run_of(
    plan: Plan,
    group: Group,
    config: TileOverlapConfig,
    maps: WeightMaps,
    row_bytes: int,
    gemms: list[tuple[int, Returns]],
) -> Run:
    """A Run for GEMMs of which the layout was not told: columns of the result, and how its rows return."""
    exchange = exchange_of(group, plan.peers, plan.device_counts, plan.num_experts, *plan.slots.shape)
    found = schedules(group.op, exchange, plan, row_bytes, gemms)
    by_gemm = {(schedule.n, schedule.returns): schedule for schedule in found}
    return Run(group, config, maps, plan.device_counts, exchange, by_gemm, row_bytes)


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
    tokens = _aligned(tokens)
    rows, arriving = _arriving_rows(tokens, plan, run)
    results = []
    for operand in operands:
        result = tokens.new_empty(rows.shape[0], operand.width)
        _project(run, operand.width, rows, arriving, gemm_of([(rows, operand)], result, run))
        results.append(result)
        # The first operand's kernel sends and receives; the next ones find everything in place.
        arriving = {}
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
    tokens = _aligned(tokens)
    rows, arriving = _arriving_rows(tokens, plan, run)
    hidden = tokens.new_empty(rows.shape[0], gate.width)
    gemm = gemm_of([(rows, gate)], into[0], run)
    gemm.update(
        up_maps=run.maps(up, rows.dtype).data_ptr(),
        up=into[1].data_ptr(),
        stride=into[1].stride(0),
        hidden=hidden.data_ptr(),
        row_weights=plan.row_weights.data_ptr(),
        alpha=act.alpha,
        limit=act.limit,
        shift=act.shift,
    )
    _project(run, gated_width(gate.width), rows, arriving, gemm)
    return hidden, rows


def arrived_rows(tokens: torch.Tensor, width: int, plan: Plan, run: Run) -> torch.Tensor:
    """The expert rows [R, K] alone.

    Args:
        width: of a schedule for :data:`ARRIVALS`.
    """
    tokens = _aligned(tokens)
    rows, arriving = _arriving_rows(tokens, plan, run)
    _arrive(run, width, rows, arriving)
    return rows


def multiply(
    run: Run, width: int, returns: Returns, pairs: list[tuple[torch.Tensor, Operand]], result: torch.Tensor
) -> None:
    """The expert GEMM alone, by the schedule for so many columns whose rows return so; see :func:`gemm_of`."""
    gemm = gemm_of(pairs, result, run)
    run.op.multiply(run.exchange, run.tiles(width, returns), raw_stream(result), **gemm)


def _project(run: Run, width: int, rows: torch.Tensor, arriving: dict, gemm: dict) -> None:
    """A GEMM of expert rows, and what has to arrive for it: inside of it, or before where they do not overlap.

    Args:
        width: of the schedule.
    """
    if arriving and not run.overlaps_dispatch:
        _arrive(run, width, rows, arriving)
        arriving = {}
    tiles, stream = run.tiles(width, ARRIVALS), raw_stream(rows)
    if arriving:
        run.op.project_arriving(run.exchange, run.pool.tokens.native, tiles, stream, **gemm, **arriving)
    else:
        run.op.multiply(run.exchange, tiles, stream, **gemm)


def _arrive(run: Run, width: int, rows: torch.Tensor, arriving: dict) -> None:
    here = dict(a=rows.data_ptr(), is_half=rows.dtype == torch.float16, trace=run.pool.trace)
    tiles = run.tiles(width, ARRIVALS)
    run.op.arrive(run.exchange, run.pool.tokens.native, tiles, raw_stream(rows), **here, **arriving)


def _aligned(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens where couriers, who read 16 bytes at a time, can read them; a view may begin anywhere.

    Whoever launches the couriers holds a copy until then: its memory would be given to what is made next.
    """
    return tokens if tokens.data_ptr() % 16 == 0 else tokens.clone()


def _arriving_rows(tokens: torch.Tensor, plan: Plan, run: Run) -> tuple[torch.Tensor, dict]:
    """The expert rows [R, K] with this rank's own in place, and what the couriers are told of all others.

    Args:
        tokens: aligned; held by the caller until the couriers are launched.
    """
    run.pool.follow(raw_stream(tokens))
    tally = plan.tally
    arriving = tally.most_arriving * run.row_bytes
    run.pool.tokens.reserve(arriving, 2 * arriving)
    rows = tokens.new_empty(tally.num_rows, tokens.shape[1])
    place_own_rows(tokens, plan, rows)
    return rows, dict(
        tokens=tokens.data_ptr(),
        sent_tokens=plan.sent_tokens.data_ptr(),
        row_sources=plan.row_sources.data_ptr(),
        own_first=tally.own_received,
        own_end=tally.own_received + tally.own_rows,
    )


def gemm_of(pairs: list[tuple[torch.Tensor, Operand]], result: torch.Tensor, run: Run) -> dict:
    """The expert GEMM as the operator takes it: result [R, N], the sum over one or two pairs of rows [R, K] times
    weights."""
    (rows, operand), *second = pairs
    arguments = dict(
        a=rows.data_ptr(),
        b_maps=run.maps(operand, rows.dtype).data_ptr(),
        c=result.data_ptr(),
        num_rows=result.shape[0],
        n=result.shape[1],
        k=rows.shape[1],
        is_half=result.dtype == torch.float16,
        b_is_transposed=operand.transposed,
        trace=run.pool.trace,
    )
    for other, its_operand in second:
        maps = run.maps(its_operand, rows.dtype)
        arguments.update(a2=other.data_ptr(), b2_maps=maps.data_ptr(), k2=other.shape[1])
    return arguments


def return_while_computed(
    pairs: list[tuple[torch.Tensor, Operand]],
    plan: Plan,
    run: Run,
    stages: Stages,
    home: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Rows times their experts' weights, summed at the owners of their tokens.

    The couriers are warps of the GEMM, or run beside it on SMs of their own; the sum follows.

    Args:
        pairs: one or two of rows [R, K] and weights, whose products are added.
        home: the stage that the rows return for.
        meanwhile: queues work that runs while the last rows are on their way.

    Returns:
        [T, width].
    """
    op, pool, sums_return, exchange = run.op, run.pool, plan.returns.sums, run.exchange
    channel, (rows, operand) = pool.returns, pairs[0]
    width = operand.width
    tiles = run.tiles(width, plan.returns)
    channel.reserve(*(count * run.row_bytes for count in rows_to_receive(plan)))
    outputs = rows.new_empty(rows.shape[0], width)
    sums = rows.new_empty(plan.slots.shape[0], width)
    returning = dict(index=plan.choice_rows.data_ptr(), sums=sums_return, comm_sms=run.comm_sms)
    if not sums_return:
        returning["signals"] = pool.signals_for(tiles.num_bands * -(-width // TILE_N) * 2)
    stream = raw_stream(rows)
    with stages(f"expert_gemm => {home}"):
        returning |= gemm_of(pairs, outputs, run)
        if run.comm_sms:
            main = torch.cuda.current_stream(rows.device)
            op.begin_returning(exchange, channel.native, tiles, stream, **returning)
            pool.forked.record(main)
        op.multiply_returning(exchange, channel.native, tiles, stream, **returning)
        if run.comm_sms:
            pool.stream.wait_event(pool.forked)
            op.run_couriers_home(exchange, channel.native, tiles, pool.stream.cuda_stream, **returning)
            pool.joined.record(pool.stream)
    try:
        meanwhile()
    finally:
        # Also where that raised: what the couriers still read must not be given to anybody before.
        if run.comm_sms:
            main.wait_event(pool.joined)
    with stages(home):
        op.sum_returned(
            exchange,
            channel.native,
            stream,
            local=outputs.data_ptr(),
            slots=plan.slots.data_ptr(),
            sums=sums.data_ptr(),
            num_tokens=sums.shape[0],
            width=width,
            is_half=rows.dtype == torch.float16,
            trace=pool.trace,
        )
    return sums


def weight_grads(grads: torch.Tensor, rows: torch.Tensor, plan: Plan, run: Run) -> torch.Tensor:
    """As :func:`expert_gemm.weight_grads`: contiguous [R, N], [R, K] -> [E_local, N, K]."""
    num_experts = len(plan.expert_counts)
    result = rows.new_empty(num_experts, grads.shape[1], rows.shape[1])
    maps = torch.empty(2 * num_experts * run.op.MAP_BYTES, dtype=torch.uint8, device=rows.device)
    run.op.weight_grads(
        run.exchange,
        raw_stream(rows),
        grads=grads.data_ptr(),
        rows=rows.data_ptr(),
        c=result.data_ptr(),
        row_offsets=plan.row_offsets.data_ptr(),
        maps=maps.data_ptr(),
        num_experts=num_experts,
        num_rows=rows.shape[0],
        n=grads.shape[1],
        k=rows.shape[1],
        is_half=rows.dtype == torch.float16,
    )
    return result


class ScalarReturn:
    """One float32 a row [R] goes to the owners of the rows' tokens: sent at once, collected later.

    Args:
        tiles: any schedule of this Plan, as the operator takes it.
    """

    def __init__(self, values: torch.Tensor, tiles, plan: Plan, run: Run):
        channel, tally = run.pool.scalars, plan.tally
        most = tally.most_sent_away * scalar_bytes(plan.top_k)
        channel.reserve(most, 2 * most)
        self._run, self._like = run, plan.slots
        self._shared = run.exchange, channel.native, tiles, raw_stream(values)
        self._arguments = dict(
            values=values.data_ptr(),
            index=plan.choice_rows.data_ptr(),
            choice_slots=plan.choice_slots.data_ptr(),
            slots=plan.slots.data_ptr(),
            own_first=tally.own_sent,
            own_end=tally.own_sent + tally.own_rows,
        )
        # What the addresses belong to.
        self._kept = values, plan
        run.op.send_scalars(*self._shared, **self._arguments)

    def collect(self) -> torch.Tensor:
        """The scalars of each token's choices [T, k] float32, 0 for a dropped one."""
        results = torch.empty_like(self._like, dtype=torch.float32)
        self._run.op.collect_scalars(*self._shared, **self._arguments, results=results.data_ptr())
        return results
