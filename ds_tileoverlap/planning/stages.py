"""The four stages in which an exchange and a GEMM are one kernel, simulated on one rank with the code's own schedule.

    in          tokens travel => gate and up projection        in back     gradients of the rows => return
    down back   gradients travel => down projection, back      down        down projection => return

Peers are taken to do the same at the same time: what they send comes as this rank's goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layout import Plan
from ..schedule import ARRIVALS, BAND, TILE_N, Returns, gated_width, plain_items, plain_segments
from .profile import Profile
from .routing import Shape
from .simulation import claimed, claimed_at_once, in_order

BLOCK_K = 64


@dataclass(frozen=True)
class Stage:
    """The GEMM [R, k] x [k, n] of a stage, with the rows that arrive for it or with how its rows return."""

    name: str
    title: str
    n: int
    k: int
    returns: Returns

    @property
    def arrives(self) -> bool:
        return self.returns.local_first


def stages_of(shape: Shape, returns: Returns, gated: bool = True) -> list[Stage]:
    """Args: gated: whether experts have a gate beside the up projection."""
    hidden, inner = shape.hidden, shape.intermediate
    first, wide = (gated_width(inner), 2 * inner) if gated else (inner, inner)
    return [
        Stage("in", "dispatch => gate/up", first, hidden, ARRIVALS),
        Stage("down", "down => return", hidden, inner, returns),
        Stage("down back", "dY => down dgrad", inner, hidden, ARRIVALS),
        Stage("in back", "up dgrad => dX return", hidden, wide, returns),
    ]


class Work:
    """What one rank does in a stage; it depends on no rate.

    Attributes:
        bands: [items, 2], the bands of rows that an item reads and writes.
        remote: [items], whether an item touches rows of other ranks.
        panels: [items], the panel of columns of an item.
        own_bytes, remote_bytes: of the expert rows of this rank's own tokens, and of those of other ranks.
        out_bytes, in_bytes: on the link, from and to this rank.
        tflop: of the GEMM.
    """

    def __init__(self, stage: Stage, plan: Plan, shape: Shape):
        self.stage, self.plan, self.num_tokens, rank = stage, plan, shape.tokens, plan.peers.rank
        row_bytes = self.row_bytes = shape.row_bytes
        returns, routes = stage.returns, plan.routes[:, rank]
        width = returns.panel_tiles(stage.n)
        items = plain_items(routes, rank, stage.n, returns.aligns_owners, width, returns.local_first)
        _, rows, _, tile, band, remote = np.array(items, dtype=np.int64).reshape(-1, 6).T
        self.bands = np.stack([band, band + (rows > BAND)], 1)
        self.remote, self.panels = remote.astype(bool), tile // width
        self.num_bands = int(self.bands.max(initial=-1)) + 1
        self.own_bytes, self.remote_bytes = (
            int(count) * row_bytes for count in (routes[rank].sum(), routes.sum() - routes[rank].sum())
        )
        # A sum is a row for each token that came.
        travelling = plan.remote_sends if stage.arrives or returns.sums else plan.remote_routes
        there, back = sum(travelling[rank]) * row_bytes, sum(row[rank] for row in travelling) * row_bytes
        self.out_bytes, self.in_bytes = (there, back) if stage.arrives else (back, there)
        self.tflop = 2 * plan.num_rows * stage.n * stage.k / 1e12

    @cached_property
    def segments(self) -> np.ndarray:
        """[segments, 7] as :func:`~ds_tileoverlap.schedule.plain_segments` gives them, without the end mark."""
        returns, plan = self.stage.returns, self.plan
        found = plain_segments(
            plan.routes, plan.peers.rank, self.row_bytes, returns.aligns_owners, returns.bands_per_segment
        )
        return np.array(found[:-1], dtype=np.int64).reshape(-1, 7)

    @property
    def link_bytes(self) -> int:
        """Of the busier direction."""
        return max(self.out_bytes, self.in_bytes)


@dataclass(frozen=True)
class Timeline:
    """When things happen in a fused stage, microseconds from its start on the device.

    Attributes:
        spans: name -> (starts, ends) of ``math`` (items), ``out`` (couriers send), ``arrivals`` (couriers put rows in
            place, or a return's rows come home) and ``small`` (own rows, sums: kernels before and after).
        end: of the stage.
        workers: that do the items.
    """

    spans: dict[str, tuple[np.ndarray, np.ndarray]]
    end: float
    workers: int


def gemm_us(work: Work, profile: Profile, by_torch: bool = False) -> float:
    """The stage's GEMM alone, the package's or torch's."""
    rates = profile.rates
    once = rates.torch_us if by_torch else rates.gemm_us
    return once + claimed_at_once(len(work.bands), _item_us(work, profile, by_torch), profile.num_sms // 2)


def _item_us(work: Work, profile: Profile, by_torch: bool = False) -> float:
    rates, blocks = profile.rates, -(-work.stage.k // BLOCK_K)
    item, block = (rates.torch_item_us, rates.torch_block_us) if by_torch else (rates.item_us, rates.block_us)
    return item + block * blocks * work.tflop**rates.throttle


def _us(num_bytes: float, gbs: float) -> float:
    return num_bytes / gbs / 1e3


def fused(work: Work, profile: Profile) -> Timeline:
    """The stage on the overlap backend."""
    return _arriving(work, profile) if work.stage.arrives else _returning(work, profile)


def _dragged_item_us(work: Work, profile: Profile, courier_bytes: int) -> float:
    """An item beside couriers, which take their share of memory and power over the whole GEMM."""
    alone = gemm_us(work, profile)
    return _item_us(work, profile) * (1 + _us(courier_bytes, profile.rates.drag_gbs) / alone)


def _arriving(work: Work, profile: Profile) -> Timeline:
    rates, workers, plan = profile.rates, profile.num_sms // 2, work.plan
    own_rows_read = int(plan.sends[plan.peers.rank, plan.peers.rank]) * work.row_bytes
    begun = rates.arrive_us + _us(work.own_bytes + own_rows_read, rates.sum_gbs)
    sent = begun + _us(work.out_bytes, profile.courier_gbs)
    came = begun + _arrivals(plan, work.row_bytes, profile)
    # The same couriers send first, then put in place what came, segment by segment.
    segments = work.segments
    placing = _us(segments[:, 1] * work.row_bytes, rates.place_gbs)
    placed = in_order(np.maximum(came[segments[:, 2]], sent), placing)
    in_place = np.full(work.num_bands, begun)
    np.maximum.at(in_place, segments[:, 4], placed)
    item_us = _dragged_item_us(work, profile, work.out_bytes + work.remote_bytes)
    ends = claimed(in_place[work.bands].max(1) + rates.gemm_us, item_us, workers)
    spans = {
        "math": (ends - item_us, ends),
        "out": (np.array([begun]), np.array([sent])),
        "arrivals": (placed - placing, placed),
        "small": (np.array([0.0]), np.array([begun])),
    }
    return Timeline(spans, float(max(ends.max(initial=begun), placed.max(initial=sent))), workers)


def _arrivals(plan: Plan, row_bytes: int, profile: Profile) -> np.ndarray:
    """[W] when all tokens of each peer are here, if all begin at 0: each sends to the ranks before it first."""
    size, rank = plan.peers.size, plan.peers.rank
    remote, ready, durations = np.array(plan.remote_sends), np.zeros(size), np.zeros(size)
    for peer in range(size):
        before = [(peer - 1 - i) % size for i in range((peer - rank - 1) % size)]
        ready[peer] = _us(remote[peer, before].sum() * row_bytes, profile.courier_gbs)
        durations[peer] = _us(remote[peer, rank] * row_bytes, profile.courier_gbs)
    came, order = np.empty(size), np.argsort(ready, kind="stable")
    came[order] = in_order(ready[order], durations[order]) + profile.link_us
    return came


def _returning(work: Work, profile: Profile) -> Timeline:
    rates, workers = profile.rates, profile.num_sms // 2
    begun = rates.return_us
    item_us = _dragged_item_us(work, profile, work.remote_bytes + work.out_bytes)
    ends = claimed(np.full(len(work.bands), begun + rates.gemm_us), item_us, workers)
    ready, carrying = (_sums if work.stage.returns.sums else _rows)(work, profile, ends)
    sent = in_order(np.maximum(ready, begun), carrying)
    computed = float(ends.max(initial=begun))
    home = float(sent.max(initial=begun)) + profile.link_us
    end = max(computed, home) + _us(_summed_bytes(work), rates.sum_gbs)
    spans = {
        "math": (ends - item_us, ends),
        "out": (sent - carrying, sent),
        "arrivals": (sent - carrying + profile.link_us, sent + profile.link_us),
        "small": (np.array([0.0, max(computed, home)]), np.array([begun, end])),
    }
    return Timeline(spans, end, workers)


def _rows(work: Work, profile: Profile, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the tiles of each segment are computed, and how long it takes to carry."""
    band_ends = np.zeros(work.num_bands)
    np.maximum.at(band_ends, work.bands, ends[:, None])
    firsts, counts = work.segments[:, 4], work.segments[:, 5]
    ready = np.array([band_ends[first : first + count].max() for first, count in zip(firsts, counts)])
    return ready, _us(work.segments[:, 1] * work.row_bytes, profile.courier_gbs)


def _sums(work: Work, profile: Profile, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the remote tiles of each panel are computed, and how long its sums take to be added up and carried."""
    tiles = -(-work.stage.n // TILE_N)
    width = work.stage.returns.panel_tiles(work.stage.n)
    num_panels = -(-tiles // width)
    ready = np.zeros(num_panels)
    np.maximum.at(ready, work.panels[work.remote], ends[work.remote])
    share = np.array([min(width, tiles - panel * width) / tiles for panel in range(num_panels)])
    each = max(_us(work.remote_bytes, profile.rates.courier_sum_gbs), _us(work.out_bytes, profile.courier_gbs))
    return ready, share * each


def _summed_bytes(work: Work) -> int:
    """Own rows and received ones are read, one row a token is written."""
    return work.own_bytes + work.in_bytes + work.num_tokens * work.row_bytes


def fused_us(work: Work, profile: Profile) -> float:
    """The stage on the overlap backend, launches included."""
    return max(fused(work, profile).end, host_us(work, profile))


def host_us(work: Work, profile: Profile) -> float:
    """What the host needs to launch the fused stage."""
    return profile.rates.host_arrive_us if work.stage.arrives else profile.rates.host_return_us


def link_us(work: Work, profile: Profile) -> float:
    """The bytes of the busier direction at the link's rate."""
    return _us(work.link_bytes, profile.link_gbs) + profile.link_us


def sequential_us(work: Work, profile: Profile) -> float:
    """The stage on the sequential backend: torch's grouped GEMM, an all-to-all, and gathers or sums around it."""
    rates, plan = profile.rates, work.plan
    sent, received = sum(plan.send_splits), sum(plan.recv_splits)
    if work.stage.arrives:  # tokens are gathered, and expert rows from what came
        copies, host = _us((2 * sent + received + plan.num_rows) * work.row_bytes, rates.gather_gbs), "dispatch"
    else:  # expert rows are summed, and what came home
        moved = plan.num_rows + received + sent + work.num_tokens
        copies, host = _us(moved * work.row_bytes, rates.sum_gbs), "combine"
    device = gemm_us(work, profile, by_torch=True) + all_to_all_us(plan.remote_sends, work, profile) + copies
    return max(device, getattr(rates, f"host_{host}_us"))


def serial_us(work: Work, profile: Profile) -> float:
    """torch's grouped GEMM, then an all-to-all of every remote row."""
    return gemm_us(work, profile, by_torch=True) + all_to_all_us(work.plan.remote_routes, work, profile)


def all_to_all_us(rows: list[list[int]], work: Work, profile: Profile) -> float:
    """Args: rows [W][W] from rank to rank. The busiest rank and direction takes longest."""
    table = np.array(rows)
    busiest = int(max(table.sum(0).max(), table.sum(1).max())) * work.row_bytes
    return profile.rates.nccl_us + profile.link_us + _us(busiest, profile.all_to_all_gbs)


def works(shape: Shape, plan: Plan) -> Iterator[Work]:
    """The stages of a Plan that says how rows return."""
    for stage in stages_of(shape, plan.returns):
        yield Work(stage, plan, shape)
