"""Several ranks in one process on one GPU: each has its own words, buffers and streams, and all of them run at once.

The kernels know nothing of ranks but addresses, so a peer may as well be a neighbour on the same GPU. All values are
small integers: every sum is exact in 16 bits whatever its order, and results are compared bit for bit.

The machine may also be the host: see :class:`emulated_op.Host`, which has the same as :class:`Gpu`.

Letters: W ranks, E experts, E_local = E / W, T tokens of a rank, k = top_k, R rows of a rank's GEMM, K and N its sizes.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from ranks import Ranks
from torch.utils import cpp_extension

from ds_tileoverlap import overlap_group, placement, schedule
from ds_tileoverlap.op_builder import tileoverlap as builders
from ds_tileoverlap.schedule import ARRIVALS, Returns
from ds_tileoverlap.weight_maps import WeightMaps

DEVICE = torch.device("cuda")
# What can be late or missing, in the order in which a rank enqueues it: the ranks meet, tokens travel; rows come home.
TOKENS, HOME = ("meet", "project"), ("begin", "gemm", "couriers", "sum")
STAGES = TOKENS + HOME
CHANNELS = {"tokens": TOKENS, "returns": HOME}
# Which stage makes a result.
MADE_BY = {"gathered": "project", "hidden": "project", "outputs": "gemm", "sums": "sum"}
# SMs of one rank: all ranks must be resident together, with room for a kernel of each that waits between two GEMMs.
SMS_OF_RANK = {1: 100, 2: 48, 4: 28, 8: 14}
# About a millisecond at the H200's highest clock; nothing depends on its exact length.
CYCLES_PER_MS = 2_000_000
# Behind every matrix lie so many rows, and behind words so many words, that no kernel may touch.
GUARD_ROWS, GUARD_WORDS, UNTOUCHED = 5, 64, -1
# At most so many terms of a dot product are not 0, and at most so large are sums over all choices of a token.
MOST_TERMS, LARGEST_SUM = 16, 128


class ManyStreams(Ranks):
    """One process in which streams do not share hardware queues: a kernel that waits must hold up no other stream."""

    def __init__(self):
        super().__init__(1, "cuda")

    def __call__(self, function, *args, limit_s: float = 120.0):
        return super().__call__(function, *args, limit_s=limit_s)[0]

    # Several threads may start processes at once, and the patch takes all variables away for a moment when it ends.
    _environment = threading.Lock()

    def _start(self):
        with self._environment, patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32"):
            super()._start()


# --- the problem ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """One use of the receive buffers by all ranks.

    Attributes:
        lengths: T of each rank.
        returns: how rows come home.
        stages: :data:`TOKENS`, :data:`HOME` or both.
        comm_sms: SMs that the couriers of the rows home have to themselves; 0: they are warps of the GEMM.
        overlaps_dispatch: whether tokens travel under the GEMM that reads them, or before it.
        at_home: ranks whose tokens go to their own experts alone.
        skew: 0 for a balanced router, 1 for one with favourite experts.
    """

    lengths: tuple[int, ...]
    returns: Returns = Returns(False, False, 2, 1)
    stages: tuple[str, ...] = HOME
    comm_sms: int = 0
    overlaps_dispatch: bool = True
    num_experts: int = 8
    top_k: int = 2
    inner: int = 200
    width: int = 520
    dtype: torch.dtype = torch.bfloat16
    at_home: tuple[int, ...] = ()
    skew: float = 0.5
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        return 2 * self.inner

    @property
    def row_bytes(self) -> int:
        return 2 * self.width

    @property
    def column_tiles(self) -> int:
        return -(-self.width // schedule.TILE_N)


def routes_of(use: Use) -> list[torch.Tensor]:
    """Every rank's [T, k] routes, int32 on the host; about a tenth of them are dropped (-1)."""
    generator = torch.Generator().manual_seed(use.seed)
    local = use.num_experts // use.num_ranks
    favour = torch.rand(use.num_experts, generator=generator) * use.skew
    routes = []
    for rank, length in enumerate(use.lengths):
        scores = torch.rand(length, use.num_experts, generator=generator) + favour
        if rank in use.at_home:
            scores[:, : rank * local] = scores[:, (rank + 1) * local :] = -1.0
        chosen = scores.topk(use.top_k, 1).indices.int()
        routes.append(chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.1, -1))
    return routes


def tokens_of(use: Use, rank: int, device: torch.device) -> torch.Tensor:
    """[T, K] of -1, 0 and 1."""
    generator = torch.Generator(device).manual_seed(1000 * use.seed + 10 + rank)
    shape = (use.lengths[rank], use.inner)
    return torch.randint(-1, 2, shape, generator=generator, device=device).to(use.dtype)


def weights_of(use: Use, device: torch.device) -> torch.Tensor:
    """[E, N, K] of -1, 0 and 1, so few of them not 0 that the sum over all choices of a token is exact in bf16."""
    generator = torch.Generator(device).manual_seed(1000 * use.seed)
    terms = min(MOST_TERMS, LARGEST_SUM // use.top_k)
    lines = (use.num_experts, use.width)
    places = torch.randint(0, use.inner, (*lines, terms), generator=generator, device=device)
    signs = torch.randint(0, 2, (*lines, use.inner), generator=generator, device=device, dtype=torch.int8) * 2 - 1
    chosen = torch.zeros(*lines, use.inner, dtype=torch.int8, device=device).scatter_(-1, places, 1)
    return (signs * chosen).to(use.dtype)


def expected_sums(x: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, N], what comes back to a rank's tokens: the sum of all their experts' outputs, exact."""
    sums = torch.zeros(len(x), weights.shape[1], dtype=torch.float64, device=x.device)
    for expert, weight in enumerate(weights):
        tokens = (routes == expert).any(1).nonzero().squeeze(1).to(x.device)
        sums[tokens] += x[tokens].double() @ weight.double().t()
    rounded = sums.to(x.dtype)
    assert torch.equal(rounded.double(), sums), "the test's numbers are too large to be exact"
    return rounded


def products_of(rows: torch.Tensor, counts: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """[R, N], the rows of each expert times its weight [N, K], exact."""
    parts = rows.double().split(list(counts))
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights.double())]).to(rows.dtype)


def received_rows(use: Use, placed: Placement, of_tokens: bool = False) -> np.ndarray:
    """[W, W], how many rows come to each rank from each rank: tokens, or what returns of them."""
    counts = placed.sends.T if of_tokens else placed.sends if use.returns.sums else placed.routes.sum(2)
    return np.where(np.eye(use.num_ranks, dtype=bool), 0, counts).astype(np.int64)


@dataclass(frozen=True)
class Placement:
    """The layout of all ranks at once. Attributes: counts [W, E + W + 1]; the others by rank, as in the Plan."""

    counts: torch.Tensor
    sent_tokens: list[torch.Tensor]
    choice_slots: list[torch.Tensor]
    token_slots: list[torch.Tensor]
    choice_rows: list[torch.Tensor]
    row_sources: list[torch.Tensor]

    @property
    def routes(self) -> np.ndarray:
        """[W, W, E_local]."""
        size = len(self.counts)
        return self.counts.numpy()[:, : -size - 1].reshape(size, size, -1)

    @property
    def sends(self) -> np.ndarray:
        """[W, W]."""
        return self.counts.numpy()[:, -len(self.counts) - 1 : -1]

    def expert_counts(self, rank: int) -> list[int]:
        return self.routes[:, rank].sum(0).tolist()

    def received_of(self, rank: int, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a rank receives of the tokens of each rank, its own included."""
        ends = self.sends.cumsum(1)
        parts = [slice(int(ends[s, rank] - self.sends[s, rank]), int(ends[s, rank])) for s in range(len(tokens))]
        return [x[sent[part].long().to(x.device)] for x, sent, part in zip(tokens, self.sent_tokens, parts)]

    def rows_of(self, rank: int, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, K], the rows of a rank's GEMM from the tokens of all ranks."""
        received = torch.cat(self.received_of(rank, tokens))
        return received[self.row_sources[rank].long().to(received.device)]


def place(routes: Sequence[torch.Tensor], num_experts: int) -> Placement:
    """Every rank's layout, on the host; slices stand for the exchange."""
    size = len(routes)
    counted = [placement.count_routes(chosen, num_experts, size) for chosen in routes]
    placed = [placement.place_tokens(r, torch.zeros(r.shape), c, size) for r, c in zip(routes, counted)]
    sent_tokens, choice_slots, token_slots, sent_routes = map(list, zip(*placed))
    result = Placement(torch.stack([c.counts for c in counted]), sent_tokens, choice_slots, token_slots, [], [])
    for rank in range(size):
        # A token and its routes lie in the same row.
        rows = [torch.arange(len(sent)) for sent in sent_routes]
        parts = replace(result, sent_tokens=rows).received_of(rank, sent_routes)
        received = torch.cat(parts)
        num_rows = int((received[:, : routes[0].shape[1]] >= 0).sum())
        first = sum(map(len, parts[: rank + 1]))
        choice_rows, row_sources, *_ = placement.place_rows(received, num_experts // size, num_rows, first)
        result.choice_rows.append(choice_rows)
        result.row_sources.append(row_sources)
    return result


def words_of_items(items: Sequence[tuple[int, int, int, int, int, bool]]) -> torch.Tensor:
    """[n, 4] int32, the items of :func:`schedule.plain_items` as the GEMM reads them."""
    words = [(r, n, e | (schedule.REMOTE if remote else 0) | c << 16, band) for r, n, e, c, band, remote in items]
    return torch.from_numpy(np.array(words, dtype=np.int64).reshape(-1, 4).astype(np.uint32).view(np.int32))


def tiles_of_item(item: tuple[int, int, int, int, int, bool], column_tiles: int) -> list[tuple[int, int]]:
    """(band, column tile) of the one or two tiles of an item: two bands, or one band at two column tiles."""
    _, rows, _, column, band, _ = item
    if rows > schedule.BAND:
        return [(band, column), (band + 1, column)]
    return [(band, c) for c in (column, column + 1) if c < column_tiles]


class Tables(NamedTuple):
    """One rank's schedule, list by list; see :meth:`ds_tileoverlap.schedule.Schedule.list_at`."""

    row_bytes: int
    items: torch.Tensor
    num_items: torch.Tensor
    segments: torch.Tensor
    num_segments: torch.Tensor
    panel_tiles: torch.Tensor
    band_parts: torch.Tensor
    sum_runs: torch.Tensor
    send_runs: torch.Tensor
    num_bands: int


def tables_of(use: Use, placed: Placement, rank: int, device: torch.device, returns: Returns) -> Tables:
    """One rank's schedule of :data:`ARRIVALS` or of the use's own returns, from the plain functions: nothing depends on
    the schedule's kernel."""
    arrive, panel_tiles = returns.local_first, returns.panel_tiles(use.width)
    row_bytes = use.token_bytes if arrive else use.row_bytes
    mine = placed.routes[:, rank]
    items = schedule.plain_items(mine, rank, use.width, returns.aligns_owners, panel_tiles, arrive)
    to_do, num_bands = [0] * returns.num_panels, 0
    for item in items:
        for band, column in tiles_of_item(item, use.column_tiles):
            num_bands = max(num_bands, band + 1)
            to_do[column // panel_tiles] += item[5]
    segments = schedule.plain_segments(placed.routes, rank, row_bytes, returns.aligns_owners, returns.bands_per_segment)

    def words(values, width):
        return torch.from_numpy(np.array(values, dtype=np.int32).reshape(-1, width)).to(device)

    return Tables(
        row_bytes=row_bytes,
        items=words_of_items(items).to(device),
        num_items=words([len(items)], 1),
        segments=words([(*segment, 0) for segment in segments], 8),
        num_segments=words([len(segments) - 1], 1),
        panel_tiles=words(to_do, 1),
        band_parts=words([*schedule.plain_band_parts(segments, num_bands), UNTOUCHED] if arrive else [], 1),
        sum_runs=words(schedule.plain_runs(placed.sends.T, rank), 4),
        send_runs=words(schedule.plain_send_runs(placed.sends, rank), 4),
        num_bands=num_bands,
    )


def slots_of(use: Use, placed: Placement, routes: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """[T, k], where each choice is summed from."""
    sent = (placed.token_slots[rank], placed.sends) if use.returns.sums else None
    return schedule.plain_slots(routes[rank], placed.routes, rank, sent)


# --- the ranks --------------------------------------------------------------------------------------------------------


def _words(count: int, value: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=device)


class VirtualChannel:
    """One rank's end of one kind of row, named as :class:`ds_tileoverlap.buffer.Channel`."""

    def __init__(self, rank: int, size: int, capacity_bytes: int, start: int, failure: torch.Tensor):
        self.rank, self.capacity_bytes, self._failure, device = rank, capacity_bytes, failure, failure.device
        self.epoch = _words(1, start, device)
        self.claimed, self.placed, self.finished = (_words(1, 0, device) for _ in range(3))
        self.targets, self.arrived, self.consumed, self.began = (_words(size, start, device) for _ in range(4))
        # All bits set is NaN in both dtypes: what is read before it has come does not go unnoticed.
        self.buffer = torch.full((2 * capacity_bytes + GUARD_WORDS,), 255, dtype=torch.uint8, device=device)

    def meet(self, everyone: Sequence[VirtualChannel]) -> None:
        """Learns the addresses of the others."""
        self.peer_buffers = self._addresses(peer.buffer.data_ptr() for peer in everyone)
        self.peer_arrived, self.peer_consumed, self.peer_began = (
            self._addresses(getattr(peer, name).data_ptr() + 4 * self.rank for peer in everyone)
            for name in ("arrived", "consumed", "began")
        )

    def _addresses(self, addresses) -> torch.Tensor:
        return torch.tensor(list(addresses), dtype=torch.int64, device=self._failure.device)

    def _arguments(self, *names: str) -> dict[str, int]:
        words = {name: getattr(self, name).data_ptr() for name in (*names, "epoch")}
        return dict(**words, generation_bytes=self.capacity_bytes, failure=self._failure.data_ptr())

    @property
    def sending(self) -> dict[str, int]:
        return self._arguments("peer_buffers", "peer_arrived", "consumed")

    @property
    def receiving(self) -> dict[str, int]:
        words = self._arguments("arrived", "targets", "peer_consumed", "finished")
        return dict(**words, received=self.buffer.data_ptr())


class VirtualRank:
    """One rank's words, channels and streams, named as in :class:`ds_tileoverlap.buffer.Pool`."""

    def __init__(self, machine, rank: int, size: int, capacities: Sequence[int], num_signals: int, start: int):
        self.machine, self.device, self.rank, self.trace = machine, machine.device, rank, 0
        self.claimed_items, self.failure = _words(1, 0, self.device), _words(5, 0, self.device)
        self.tokens, self.returns = (VirtualChannel(rank, size, bytes_, start, self.failure) for bytes_ in capacities)
        self.signals = _words(num_signals + GUARD_WORDS, start, self.device)
        self.main, self.stream = (streams[rank] for streams in machine.streams)
        self.forked, self.joined = machine.event(), machine.event()
        self.began, self.ended = machine.event(enable_timing=True), machine.event(enable_timing=True)


class Gpu:
    """What a play needs of the machine that it runs on."""

    device, event, synchronize = DEVICE, torch.cuda.Event, staticmethod(torch.cuda.synchronize)

    @property
    def op(self):
        return operator()

    @functools.cached_property
    def streams(self) -> tuple[list[torch.cuda.Stream], list[torch.cuda.Stream]]:
        """Every rank's main stream and the stream of its couriers: the same ones for all tests of a process."""
        most = max(SMS_OF_RANK)
        return [torch.cuda.Stream() for _ in range(most)], [torch.cuda.Stream(priority=-1) for _ in range(most)]

    @staticmethod
    def sleep(stream: torch.cuda.Stream, ms: float) -> None:
        """Holds a stream up for about so long."""
        if ms:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    @staticmethod
    def load_kernels() -> None:
        _load_kernels()


GPU = Gpu()


@functools.cache
def _load_kernels() -> None:
    """Loads every kernel of a play before the first one waits: loading may wait for those that run."""
    rank = VirtualRank(GPU, 0, 1, (0, 0), 0, 0)
    overlap_group._load_kernels(operator(), rank)
    GPU.sleep(rank.main, 0.001)
    torch.cuda.synchronize()


def streams_that_hold_up_others(ms: float) -> list[int]:
    """Which of the streams keep any of the others waiting while two of their own kernels run one after the other."""
    streams, found = [*GPU.streams[0], *GPU.streams[1]], []
    for i, stream in enumerate(streams):
        GPU.sleep(stream, ms)
        GPU.sleep(stream, ms)
        last = torch.cuda.Event()
        last.record(stream)
        for other in streams[:i] + streams[i + 1 :]:
            GPU.sleep(other, 0.001)
            other.synchronize()
        if last.query():
            found.append(i)
        torch.cuda.synchronize()
    return found


@dataclass
class Job:
    """What one rank needs for one use, and what it should make: all in memory before the first kernel starts.

    ``gathered`` [R, K] are the rows of its experts, of which only its own tokens are there before the others arrive,
    ``hidden`` [R, N] their products. ``outputs`` are those of ``rows``, the same from the start; ``sums`` [T, N] came
    home. Each of the four has guard rows behind it. ``missing`` and ``panel_left`` are counted down.
    """

    x: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    maps: torch.Tensor
    counts: torch.Tensor
    choice_rows: torch.Tensor
    row_sources: torch.Tensor
    sent_tokens: torch.Tensor
    own_first: int
    own_end: int
    slots: torch.Tensor
    arrivals: Tables
    tiles: Tables
    missing: torch.Tensor
    panel_left: torch.Tensor
    gathered: torch.Tensor
    hidden: torch.Tensor
    outputs: torch.Tensor
    sums: torch.Tensor
    expected: dict[str, torch.Tensor]


def _untouched(like: torch.Tensor) -> torch.Tensor:
    """[rows + guard, width] of NaN."""
    shape = (len(like) + GUARD_ROWS, like.shape[1])
    return torch.full(shape, UNTOUCHED, dtype=torch.int16, device=like.device).view(like.dtype)


def _jobs(machine, use: Use, placed: Placement, routes: Sequence[torch.Tensor]) -> list[Job]:
    """One a rank."""
    tokens = [tokens_of(use, rank, machine.device) for rank in range(use.num_ranks)]
    weights, counts = weights_of(use, machine.device), placed.counts.to(machine.device)
    return [_job(machine, use, placed, routes, rank, tokens, weights, counts) for rank in range(use.num_ranks)]


def _job(machine, use: Use, placed: Placement, routes, rank: int, tokens, weights, counts) -> Job:
    device, local, rows = machine.device, use.num_experts // use.num_ranks, placed.rows_of(rank, tokens)
    mine = weights[rank * local : (rank + 1) * local].clone()
    products = products_of(rows, placed.expert_counts(rank), mine)
    expected = {"gathered": rows, "hidden": products, "outputs": products}
    expected["sums"] = expected_sums(tokens[rank], routes[rank], weights)
    results = {name: _untouched(value) for name, value in expected.items()}
    sources = placed.row_sources[rank].to(device)
    own_first, own_end = (int(placed.sends[:end, rank].sum()) for end in (rank, rank + 1))
    is_own = (sources >= own_first) & (sources < own_end)
    results["gathered"][: len(rows)][is_own] = rows[is_own]
    arrivals, tiles = (tables_of(use, placed, rank, device, returns) for returns in (ARRIVALS, use.returns))
    return Job(
        x=tokens[rank],
        rows=rows,
        weights=mine,
        maps=WeightMaps().of(machine.op, "test", [(0, local, mine)], use.dtype, transposed=False),
        counts=counts,
        choice_rows=placed.choice_rows[rank].to(device),
        row_sources=sources,
        sent_tokens=placed.sent_tokens[rank].to(device),
        own_first=own_first,
        own_end=own_end,
        slots=slots_of(use, placed, routes, rank).to(device),
        arrivals=arrivals,
        tiles=tiles,
        missing=_words(arrivals.band_parts.numel() + GUARD_WORDS, UNTOUCHED, device),
        panel_left=_words(tiles.panel_tiles.numel() + GUARD_WORDS, UNTOUCHED, device),
        **results,
        expected=expected,
    )


class Enqueuer:
    """Enqueues one use on one rank: what is late is held up before it, what is absent left out."""

    def __init__(self, op, me: VirtualRank, use: Use, job: Job, late: Mapping[str, float], absent, limit_ns: int):
        self._op, self._me, self._use, self._job, self._late, self._absent = op, me, use, job, late, absent
        self._limit_ns, self._is_half, self._num_sms = limit_ns, use.dtype == torch.float16, SMS_OF_RANK[use.num_ranks]

    def _comes(self, stage: str, stream: torch.cuda.Stream | None = None) -> bool:
        self._me.machine.sleep(stream or self._me.main, self._late.get(stage, 0))
        return stage not in self._absent

    def _begin(
        self, channel: VirtualChannel, what: int, row_bytes: int, to_do: torch.Tensor, left: torch.Tensor
    ) -> None:
        op, counts = self._op, self._job.counts
        op.begin(
            counts=counts.data_ptr(), counts_stride=counts.shape[1], num_ranks=self._use.num_ranks, rank=self._me.rank,
            num_experts=self._use.num_experts, what=what, row_bytes=row_bytes, epoch=channel.epoch.data_ptr(),
            targets=channel.targets.data_ptr(), to_do=to_do.data_ptr(), left=left.data_ptr(), num_left=to_do.numel(),
            peer_began=channel.peer_began.data_ptr(), began=channel.began.data_ptr() if what == op.TOKENS_OUT else 0,
            failure=self._me.failure.data_ptr(), limit_ns=self._limit_ns, stream=self._me.main.cuda_stream,
        )  # fmt: skip

    def _courier(self, channel: VirtualChannel, tiles: Tables, rows: torch.Tensor, **errand):
        return self._op.Courier(
            rows=rows.data_ptr(), row_bytes=tiles.row_bytes, num_peers=self._use.num_ranks, rank=self._me.rank,
            segments=tiles.segments.data_ptr(), num_segments=tiles.num_segments.data_ptr(),
            claimed=channel.claimed.data_ptr(), limit_ns=self._limit_ns, **channel.sending, **errand,
        )  # fmt: skip

    def _multiply(self, tiles: Tables, rows: torch.Tensor, result: torch.Tensor, **options) -> None:
        job, use = self._job, self._use
        self._op.expert_gemm(
            a=rows.data_ptr(), b_maps=job.maps.data_ptr(), c=result.data_ptr(), items=tiles.items.data_ptr(),
            num_items=tiles.num_items.data_ptr(), claimed=self._me.claimed_items.data_ptr(), num_rows=len(job.rows),
            n=use.width, k=use.inner, is_half=self._is_half, b_is_transposed=False, stream=self._me.main.cuda_stream,
            **options,
        )  # fmt: skip

    def send_tokens(self) -> None:
        """Tokens go out by couriers of the GEMM that multiplies what arrives, or by couriers before it."""
        op, use, job, channel, tiles = self._op, self._use, self._job, self._me.tokens, self._job.arrivals
        if self._comes("meet"):
            self._begin(channel, op.TOKENS_OUT, use.token_bytes, tiles.band_parts, job.missing)
        courier = self._courier(
            channel, tiles, job.x, errand=op.SEND_ROWS, index=job.sent_tokens.data_ptr(), num_choices=1,
            runs=tiles.send_runs.data_ptr(),
        )  # fmt: skip
        carried = dict(courier=courier, arrivals=self._arrivals())
        if not self._comes("project"):
            return
        if not use.overlaps_dispatch:
            main = self._me.main.cuda_stream
            op.run_couriers(**carried, is_half=self._is_half, num_sms=self._num_sms, stream=main)
            carried = {}
        self._multiply(tiles, job.gathered, job.hidden, num_sms=self._num_sms, **carried)

    def _arrivals(self):
        channel, job, tiles = self._me.tokens, self._job, self._job.arrivals
        return self._op.Arrivals(
            rows=job.gathered.data_ptr(), row_bytes=tiles.row_bytes, sources=job.row_sources.data_ptr(),
            own_first=job.own_first, own_end=job.own_end, segments=tiles.segments.data_ptr(),
            num_segments=tiles.num_segments.data_ptr(), missing=job.missing.data_ptr(),
            claimed=channel.placed.data_ptr(), num_peers=self._use.num_ranks, limit_ns=self._limit_ns,
            **channel.receiving,
        )  # fmt: skip

    def bring_home(self) -> None:
        """Rows come home while the GEMM makes them, and are summed."""
        op, me, use, job, tiles = self._op, self._me, self._use, self._job, self._job.tiles
        channel, returns, left = me.returns, use.returns, job.panel_left
        panel_tiles, signals = returns.panel_tiles(use.width), me.signals.data_ptr()
        if self._comes("begin"):
            what = op.SUMS_HOME if returns.sums else op.ROWS_HOME
            self._begin(channel, what, use.row_bytes, tiles.panel_tiles, left)
        if returns.sums:
            waits = dict(errand=op.RETURN_SUMS, panel_left=left.data_ptr())
            announced = dict(panel_left=left.data_ptr(), panel_tiles=panel_tiles)
        else:
            waits = dict(errand=op.RETURN_ROWS, signals=signals, signals_per_band=2 * use.column_tiles)
            announced = dict(signals=signals, epoch=channel.epoch.data_ptr())
        courier = self._courier(
            channel, tiles, job.outputs, index=job.choice_rows.data_ptr(), num_choices=use.top_k,
            runs=tiles.sum_runs.data_ptr(), num_panels=returns.num_panels,
            panel_bytes=panel_tiles * schedule.TILE_N * 2, **waits,
        )  # fmt: skip
        # Before the GEMM and whatever delays it: couriers with SMs of their own start first then, and have to wait.
        me.forked.record(me.main)
        if self._comes("gemm"):
            carried = {} if use.comm_sms else dict(courier=courier)
            self._multiply(tiles, job.rows, job.outputs, num_sms=self._num_sms - use.comm_sms, **announced, **carried)
        if use.comm_sms:
            me.stream.wait_event(me.forked)
            if self._comes("couriers", me.stream):
                side = me.stream.cuda_stream
                op.run_couriers(courier=courier, is_half=self._is_half, num_sms=use.comm_sms, stream=side)
            me.joined.record(me.stream)
            me.main.wait_event(me.joined)
        if self._comes("sum"):
            op.sum_slots(
                local=job.outputs.data_ptr(), slots=job.slots.data_ptr(), sums=job.sums.data_ptr(),
                num_tokens=len(job.x), num_choices=use.top_k, width=use.width, num_peers=use.num_ranks,
                is_half=self._is_half, num_sms=self._num_sms, limit_ns=self._limit_ns, stream=me.main.cuda_stream,
                **channel.receiving,
            )  # fmt: skip


@dataclass
class Outcome:
    """What was found after all uses.

    Attributes:
        failures: of each rank (kind, peer, place, expected, seen); kind 0 where no wait passed its deadline.
        wrong: (use, rank, which result) -> how many elements are not as expected; only where there are any.
        nan: the (use, rank) all of whose sums are NaN.
        left: words that should be 0 again and are not, and guards that were written.
        uneven: counters that do not show what they should after complete uses.
        elapsed_ms: of each rank's main stream, from the first kernel to the end of the last.
    """

    failures: list[tuple[int, ...]]
    wrong: dict[tuple[int, int, str], int] = field(default_factory=dict)
    nan: set[tuple[int, int]] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    elapsed_ms: list[float] = field(default_factory=list)


def play(
    uses: Sequence[Use],
    start: int = 0,
    late: Mapping[tuple[int, int, str], float] | None = None,
    absent: Collection[tuple[int, int, str]] = (),
    limit_ms: float = 5_000.0,
    machine=GPU,
) -> Outcome:
    """Runs the uses one after the other on every rank, all ranks at once and without synchronising in between.

    Args:
        start: what all counters show before; -3 makes them wrap.
        late: (use, rank, stage) -> milliseconds by which a kernel is held up.
        absent: (use, rank, stage) of the kernels that never come.
        limit_ms: the deadline of every wait.
        machine: :class:`Gpu` or what has the same.
    """
    op, size, late = machine.op, uses[0].num_ranks, late or {}
    routes = [routes_of(use) for use in uses]
    placed = [place(chosen, use.num_experts) for use, chosen in zip(uses, routes)]
    jobs = [_jobs(machine, use, p, chosen) for use, p, chosen in zip(uses, placed, routes)]
    came = [_bytes_that_come(use, p) for use, p in zip(uses, placed)]
    capacities = [max(int(of_use[name].sum(1).max()) for of_use in came) for name in CHANNELS]
    num_signals = max(job.tiles.num_bands * use.column_tiles * 2 for use, own in zip(uses, jobs) for job in own)
    ranks = [VirtualRank(machine, r, size, capacities, num_signals, start) for r in range(size)]
    for name in CHANNELS:
        for rank in ranks:
            getattr(rank, name).meet([getattr(peer, name) for peer in ranks])
    machine.load_kernels()
    machine.synchronize()

    # From here to the end no kernel of torch is launched for the first time, and no memory is asked for.
    for rank in ranks:
        rank.began.record(rank.main)
    for u, use in enumerate(uses):
        for rank in ranks:
            delays = {stage: late.get((u, rank.rank, stage), 0) for stage in STAGES}
            never = [stage for stage in STAGES if (u, rank.rank, stage) in absent]
            enqueuer = Enqueuer(op, rank, use, jobs[u][rank.rank], delays, never, int(limit_ms * 1e6))
            if TOKENS[0] in use.stages:
                enqueuer.send_tokens()
            if HOME[0] in use.stages:
                enqueuer.bring_home()
    for rank in ranks:
        rank.ended.record(rank.main)
    machine.synchronize()

    outcome = Outcome([tuple(word & 0xFFFFFFFF for word in rank.failure.tolist()) for rank in ranks])
    outcome.elapsed_ms = [rank.began.elapsed_time(rank.ended) for rank in ranks]
    for u, own in enumerate(jobs):
        for r, job in enumerate(own):
            _inspect_job(outcome, uses[u], u, r, job)
    for rank in ranks:
        _inspect_words(outcome, rank, start)
        for name, stages in CHANNELS.items():
            epoch = start + sum(stages[0] in use.stages for use in uses)
            units = start + sum(of_use[name][rank.rank] for of_use in came) // 16
            # Only before tokens go out do the ranks meet.
            began = epoch if stages == TOKENS else start
            _inspect_channel(outcome, name, getattr(rank, name), epoch, began, units)
    return outcome


def _bytes_that_come(use: Use, placed: Placement) -> dict[str, np.ndarray]:
    """For each channel [W, W], to each rank from each rank."""
    return {
        "tokens": received_rows(use, placed, of_tokens=True) * use.token_bytes * (TOKENS[0] in use.stages),
        "returns": received_rows(use, placed) * use.row_bytes * (HOME[0] in use.stages),
    }


def _inspect_job(outcome: Outcome, use: Use, u: int, r: int, job: Job) -> None:
    for name, expected in job.expected.items():
        whole = getattr(job, name)
        found = whole[: len(expected)]
        if MADE_BY[name] in use.stages and (wrong := int((found != expected).sum())):
            outcome.wrong[u, r, name] = wrong
        if name == "sums" and len(found) and found.isnan().all():
            outcome.nan.add((u, r))
        if not (whole[len(expected) :].view(torch.int16) == UNTOUCHED).all():
            outcome.left.append(f"use {u}, rank {r}: written behind the {name}")
    # Nobody counts the word behind the bands down, nor panels where every row returns on its own.
    missing = [*[0] * job.arrivals.num_bands, UNTOUCHED]
    panel_left = [0] * use.returns.num_panels if use.returns.sums else job.tiles.panel_tiles.flatten().tolist()
    for name, expected, stages in (("missing", missing, TOKENS), ("panel_left", panel_left, HOME)):
        words = getattr(job, name)
        if stages[0] in use.stages:
            _compare(outcome, f"use {u}, rank {r}: {name}", words, expected)
        if (words[len(expected) :] != UNTOUCHED).any():
            outcome.left.append(f"use {u}, rank {r}: written behind {name}")


def _inspect_words(outcome: Outcome, rank: VirtualRank, start: int) -> None:
    if int(rank.claimed_items):
        outcome.left.append(f"rank {rank.rank}: claimed_items is {int(rank.claimed_items)}")
    if (rank.signals[-GUARD_WORDS:] != start).any():
        outcome.left.append(f"rank {rank.rank}: written behind the signals")


def _inspect_channel(
    outcome: Outcome, name: str, channel: VirtualChannel, epoch: int, began: int, units: np.ndarray
) -> None:
    who = f"rank {channel.rank}: {name}"
    for word in ("claimed", "placed", "finished"):
        if value := int(getattr(channel, word)):
            outcome.left.append(f"{who}: {word} is {value}")
    if (channel.buffer[2 * channel.capacity_bytes :] != 255).any():
        outcome.left.append(f"{who}: written behind the buffer")
    _compare(outcome, f"{who}: epoch", channel.epoch, [epoch])
    _compare(outcome, f"{who}: consumed", channel.consumed, [epoch] * len(units))
    _compare(outcome, f"{who}: began", channel.began, [began] * len(units))
    _compare(outcome, f"{who}: targets", channel.targets, units.tolist())
    _compare(outcome, f"{who}: arrived", channel.arrived, units.tolist())


def _compare(outcome: Outcome, what: str, words: torch.Tensor, expected: list[int]) -> None:
    found = words[: len(expected)].tolist()
    if found != np.array(expected, dtype=np.int64).astype(np.uint32).view(np.int32).tolist():
        outcome.uneven.append(f"{what} is {found}, expected {expected}")


# --- the operator -----------------------------------------------------------------------------------------------------

# What is taken away: (file, text, what stands there instead).
GUARDS = {
    "couriers wait for ready signals": [
        ("courier.cuh", "if (ready != part.segment && courier.in_time) {", "if (false) {"),
        ("sums.cuh", "if (panel == ready || !courier.in_time) return;", "return;"),
    ],
    "couriers wait for consumed": [
        (
            "courier.cuh",
            "wait_until([&] { return reached(read_peer_signal(consumed), epoch - GENERATIONS); }, args.failure,\n"
            "                                   args.limit_ns);",
            "true;",
        )
    ],
    "couriers wait for arrived": [
        (
            "arrivals.cuh",
            "wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.failure, args.limit_ns,\n"
            "                                 256);",
            "true;",
        )
    ],
    "bands are waited for": [("expert_gemm.cu", "        wait_for_band(arrivals, tile.band);\n", "")],
    "the sum waits for arrived": [("combine.cu", "    wait_for_rows<<<1, 128, 0, stream>>>(*arguments);\n", "")],
    "signals are stamped with the epoch": [
        ("expert_gemm.cu", "tile.column_tile) * 2 + group, epoch);", "tile.column_tile) * 2 + group, 0x40000000u);")
    ],
    "sums load ahead from ready panels": [("sums.cuh", "next.panel == ready", "next.panel >= 0")],
}
_operators: list = []


def operator():
    """This process's operator: the one of the package, unless :func:`build_without` has built another."""
    if not _operators:
        _operators.append(builders.TileOverlapBuilder().load())
    return _operators[0]


def sources_without(guard: str, folder: str) -> list[str]:
    """Copies the sources into a folder, takes a guard away there, and returns what has to be compiled."""
    copy = Path(folder) / "csrc"
    shutil.copytree(builders._csrc(), copy)
    for name, text, instead in GUARDS[guard]:
        source = (copy / name).read_text()
        assert source.count(text) == 1, f"{name} has {source.count(text)} times {text!r}: change GUARDS with the source"
        (copy / name).write_text(source.replace(text, instead))
    return [str(copy / name) for name in ("bindings.cpp", *builders.KERNELS)]


def build_without(guard: str, folder: str) -> None:
    """Makes this process's operator one that lacks a guard."""
    assert not _operators, "two operators in one process would register the same types"
    builder = builders.TileOverlapBuilder()
    build_directory = Path(folder) / "build"
    build_directory.mkdir()
    module = cpp_extension.load(
        name=f"tileoverlap_{list(GUARDS).index(guard)}",
        sources=sources_without(guard, folder),
        extra_include_paths=[str(Path(folder) / "csrc")],
        extra_cflags=builder.cxx_args(),
        extra_cuda_cflags=builder.nvcc_args(),
        build_directory=str(build_directory),
        with_cuda=True,
    )
    _operators.append(module)


class Late:
    """An operator whose kernels are held up: name of a function -> milliseconds, on the stream that it is given."""

    def __init__(self, op, side: torch.cuda.Stream, delays: Mapping[str, float]):
        self._op, self._side, self._delays = op, side, delays

    def __getattr__(self, name: str):
        found = getattr(self._op, name)
        if name not in self._delays:
            return found

        def call(*shared, **arguments):
            # The stream is the last of what comes without a name.
            is_side = shared[-1] == self._side.cuda_stream
            GPU.sleep(self._side if is_side else torch.cuda.current_stream(), self._delays[name])
            return found(*shared, **arguments)

        return call
