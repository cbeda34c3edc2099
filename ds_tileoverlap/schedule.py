"""What the overlapped return needs beside the Plan: the order of GEMM tiles, the runs of rows that go home, the slots.

Letters: W ranks, E experts, E_local = E / W, R expert rows, T tokens, k = top_k. A band is :data:`BAND` rows, the
height of a GEMM tile; a column tile is :data:`TILE_N` columns. ``csrc/schedule.cu`` computes all of it on the device;
the functions named ``plain_...`` are its twins.

Source: arXiv 2607.19539, remote-first tile schedule and combine plan; rows here are packed, not padded to tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .kernels import raw_stream
from .layout import Plan

BAND = 128
TILE_N = 256
# As csrc/schedule.cu: pairs of bands that walk the columns together.
PAIRS_AT_ONCE = 8
# Of one transfer of rows, where no profile says otherwise.
SEGMENT_BYTES = 2**21
# Added to the expert of an item whose rows have to travel.
REMOTE = 0x8000


class Schedule:
    """Flat lists on the device that the GEMM and its couriers read.

    Attributes:
        n, row_bytes, returns: as given to :func:`tilings`.
        words: [..] int32, all lists.
        native: where each of them lies, as the operator takes it.
    """

    def __init__(self, n: int, row_bytes: int, returns: Returns, native):
        self.n, self.row_bytes, self.returns, self.native = n, row_bytes, returns, native
        self.words: torch.Tensor | None = None

    def list_at(self, name: str, width: int = 1) -> torch.Tensor:
        """One list [.., width] and what follows it. Its lines, a word each where nothing else is said:

        items: first row, rows (1 to 256), expert | REMOTE | column tile << 16, band; in the order of computation.
        num_items, num_segments: one line.
        segments: first row, rows, peer, row at the peer, first band, bands, parts before it, 0; one more than there
            are, of which only the parts before it count.
        panel_tiles_to_do: tiles with remote rows in each panel; for sums that return.
        band_parts_to_do: parts of rows from peers in each band (``csrc/courier.cuh``); for rows that arrive.
        sum_runs: W - 1 lines of first received row, rows, peer, row at the peer; for sums that return.
        send_runs: the same of the rows sent, the last peer first; for tokens that go out.
        left: counters of the last two kinds, set at each use.
        """
        first = (getattr(self.native, name) - self.words.data_ptr()) // 4
        rest = self.words[first:]
        return rest[: len(rest) // width * width].view(-1, width)


def gated_width(width: int) -> int:
    """Columns of a schedule whose tiles take as many of the gate as of up: 1408 of each are 11 tiles, 2816 columns."""
    return -(-width // (TILE_N // 2)) * TILE_N


@dataclass(frozen=True)
class Returns:
    """How rows come home; the same on every rank of the group.

    Attributes:
        sums: whether one sum for each (token, rank) returns, instead of every row.
        aligns_owners: whether each owner's rows start a tile of their own.
        bands_per_segment: bands in one transfer of rows, but one at both ends.
        num_panels: groups of columns that are computed, summed and returned one after the other; 1 for rows.
        local_first: whether tiles without remote rows are computed first instead of last: those with wait for arrivals.
    """

    sums: bool
    aligns_owners: bool
    bands_per_segment: int
    num_panels: int
    local_first: bool = False

    def panel_tiles(self, n: int) -> int:
        """Column tiles of a panel: even where there are several, as the last band of an expert takes two at once."""
        tiles = -(-n // TILE_N)
        return tiles if self.num_panels == 1 else -(-tiles // (2 * self.num_panels)) * 2


# How tokens go out: whole rows, packed, in one panel.
ARRIVALS = Returns(sums=True, aligns_owners=False, bands_per_segment=1, num_panels=1, local_first=True)


def tilings(op, row_bytes: int, gemms: list[tuple[int, Returns]]) -> list[Schedule]:
    """A :class:`Schedule` without lists yet for each GEMM.

    Args:
        op: the compiled operator.
        row_bytes: of a row that travels, a multiple of 16.
        gemms: of each the columns of its result, and how rows come home or :data:`ARRIVALS`.
    """
    return [
        Schedule(
            n,
            row_bytes,
            returns,
            op.Tiling(
                n=n,
                row_bytes=row_bytes,
                aligns_owners=returns.aligns_owners,
                bands_per_segment=returns.bands_per_segment,
                panel_tiles=returns.panel_tiles(n),
                num_panels=returns.num_panels,
                local_first=returns.local_first,
            ),
        )
        for n, returns in gemms
    ]


def schedules(op, exchange, plan: Plan, row_bytes: int, gemms: list[tuple[int, Returns]]) -> list[Schedule]:
    """The :class:`Schedule` of each GEMM, made by the device on its own; the layout makes them while routes travel.

    Args:
        exchange: of the Plan's forward, as the operator takes it.
        row_bytes, gemms: as of :func:`tilings`.
    """
    found = tilings(op, row_bytes, gemms)
    natives = [schedule.native for schedule in found]
    size = plan.peers.size
    count = op.place_lists(natives, 0, plan.num_rows, size, plan.num_experts // size)
    words = plan.device_counts.new_empty(count)
    op.schedule(exchange, natives, words.data_ptr(), raw_stream(words))
    for schedule in found:
        schedule.words = words
    return found


@dataclass(frozen=True)
class _Run:
    """Rows of one expert that share tiles; its first ``remote`` rows belong to other ranks."""

    expert: int
    row: int
    rows: int
    remote: int
    band: int


def _owners(rank: int, size: int) -> list[int]:
    """The order of owners within an expert: the next ranks first, this rank last."""
    return [(rank + 1 + i) % size for i in range(size)]


def _runs(routes: np.ndarray, rank: int, aligns_owners: bool) -> list[list[_Run]]:
    """For each expert its runs. Args: routes [W, E_local] from each rank to each expert of this rank."""
    owners, row, band, runs = _owners(rank, len(routes)), 0, 0, []
    for expert in range(routes.shape[1]):
        by_owner = [(int(routes[owner, expert]), owner != rank) for owner in owners]
        groups = [[part] for part in by_owner] if aligns_owners else [by_owner]
        of_expert = []
        for group in groups:
            rows = sum(count for count, _ in group)
            of_expert.append(_Run(expert, row, rows, sum(count for count, is_remote in group if is_remote), band))
            row, band = row + rows, band - (-rows // BAND)
        runs.append(of_expert)
    return runs


def _in_order(routes: np.ndarray, rank: int) -> list[int]:
    """The experts, those with more remote rows first."""
    remote = routes.sum(0) - routes[rank]
    return sorted(range(len(remote)), key=lambda expert: -remote[expert])


def plain_items(
    routes: np.ndarray, rank: int, n: int, aligns_owners: bool, panel_tiles: int = 0, local_first: bool = False
) -> list[tuple[int, int, int, int, int, bool]]:
    """(first row, rows, expert, column tile, band, whether it touches remote rows) of every item.

    An item is a pair of bands at one column tile, or the last single band of a run at two. Items that touch remote rows
    come first, panel by panel.

    Args:
        routes: [W, E_local] routes from each rank to each expert of this rank.
        panel_tiles: column tiles of a panel; 0 for all.
        local_first: whether items without remote rows come first instead of last.

    With 300 rows of one expert from rank 1 and 40 from rank 0, on rank 0 and 256 columns, the items are
    ``(0, 256, 0, 0, 0, True)`` and ``(256, 84, 0, 0, 2, True)``: both touch remote rows.
    """
    runs, tiles = _runs(routes, rank, aligns_owners), -(-n // TILE_N)
    ordered = [run for expert in _in_order(routes, rank) for run in runs[expert]]
    panels = [(first, min(first + (panel_tiles or tiles), tiles)) for first in range(0, tiles, panel_tiles or tiles)]
    items = []
    phases = [*((True, panel) for panel in panels), (False, (0, tiles))]
    for of_remote, (first_tile, end_tile) in phases[-1:] + phases[:-1] if local_first else phases:
        for run in ordered:
            touching = -(-run.remote // (2 * BAND))
            first, end = (0, touching) if of_remote else (touching, -(-run.rows // (2 * BAND)))
            items += [(*item, of_remote) for item in _items_of_pairs(run, first, end, first_tile, end_tile)]
    return items


def _items_of_pairs(
    run: _Run, first: int, end: int, first_tile: int, end_tile: int
) -> Iterator[tuple[int, int, int, int, int]]:
    def item(pair: int, column_tile: int):
        start = pair * 2 * BAND
        return (run.row + start, min(run.rows - start, 2 * BAND), run.expert, column_tile, run.band + 2 * pair)

    single = end > first and run.rows - (end - 1) * 2 * BAND <= BAND
    full = end - single
    for group in range(first, full, PAIRS_AT_ONCE):
        for column_tile in range(first_tile, end_tile):
            for pair in range(group, min(group + PAIRS_AT_ONCE, full)):
                yield item(pair, column_tile)
    if single:
        for column_tile in range(first_tile, end_tile, 2):
            yield item(end - 1, column_tile)


def rows_of_part(row_bytes: int) -> int:
    """How many rows a courier claims at once: 2 of 4096 bytes, 1 of 20000, 32 of 100."""
    return min(max(8192 // row_bytes, 1), 32)


def plain_segments(
    routes: np.ndarray, rank: int, row_bytes: int, aligns_owners: bool, bands_per_segment: int
) -> list[tuple[int, ...]]:
    """(first row, rows, peer, row at the peer, first band, bands, parts before it) of every segment, then the end mark.

    Args:
        routes: [W, W, E_local] routes from each rank to each expert of each rank.

    With 300 rows of one expert from rank 1 and 40 from rank 0, on rank 0 and 4 bytes a row, the segments are
    ``(0, 128, 1, 0, 0, 1, 0)``, ``(128, 128, 1, 128, 1, 1, 4)`` and ``(256, 44, 1, 256, 2, 1, 8)``, and the end mark is
    ``(0, 0, 0, 0, 0, 0, 10)``.
    """
    mine = routes[:, rank]
    runs, owners, order = _runs(mine, rank, aligns_owners), _owners(rank, len(routes)), _in_order(mine, rank)
    segments, parts = [], 0
    for place, expert in enumerate(order):
        each = 1 if place in (0, len(order) - 1) else bands_per_segment
        before = 0
        for index, peer in enumerate(owners[:-1]):
            rows = int(mine[peer, expert])
            run = runs[expert][index if aligns_owners else 0]
            offset = 0 if aligns_owners else before
            row, band, in_band = runs[expert][0].row + before, run.band + offset // BAND, offset % BAND
            elsewhere = np.delete(np.arange(len(routes)), peer)
            earlier = routes[peer].copy()
            earlier[rank, expert:], earlier[rank + 1 :] = 0, 0
            peer_row = int(earlier[elsewhere].sum())
            bands = -(-(in_band + rows) // BAND) if rows else 0
            for first in range(0, bands, each):
                start, end = (min(max(b * BAND - in_band, 0), rows) for b in (first, first + each))
                segments.append(
                    (row + start, end - start, peer, peer_row + start, band + first, min(each, bands - first), parts)
                )
                parts += -(-(end - start) // rows_of_part(row_bytes))
            before += rows
    return [*segments, (0, 0, 0, 0, 0, 0, parts)]


def plain_runs(sends: np.ndarray, rank: int) -> list[tuple[int, int, int, int]]:
    """(first sent row, rows, peer, row at the peer) of the tokens for each peer.

    Args:
        sends: [W, W] rows that each rank sends to each rank; transposed, the runs are those of the sums that return.

    With 3 ranks that send ``[[5, 1, 2], [3, 9, 4], [7, 6, 8]]``, on rank 1: ``(12, 4, 2, 2)`` and ``(0, 3, 0, 0)``.
    """
    runs = []
    for peer in _owners(rank, len(sends))[:-1]:
        earlier = [r for r in range(rank) if r != peer]
        runs.append((int(sends[rank, :peer].sum()), int(sends[rank, peer]), peer, int(sends[earlier, peer].sum())))
    return runs


def plain_send_runs(sends: np.ndarray, rank: int) -> list[tuple[int, int, int, int]]:
    """The runs in which tokens go out, the previous rank's first: it places what arrives in the order of
    :func:`plain_segments`, where this rank is its first peer."""
    return plain_runs(sends, rank)[::-1]


def plain_band_parts(segments: list[tuple[int, ...]], num_bands: int) -> list[int]:
    """How many parts of rows from peers each band has.

    Args:
        segments: of :func:`plain_segments`, a band each, with the end mark.

    Segments with 1, 1 and 2 parts in bands 0, 2 and 2 give ``[1, 0, 3]``.
    """
    parts = [0] * num_bands
    for segment, after in zip(segments, segments[1:]):
        parts[segment[4]] += after[6] - segment[6]
    return parts


def plain_slots(
    experts: torch.Tensor, routes: np.ndarray, rank: int, sent: tuple[torch.Tensor, np.ndarray] | None = None
) -> torch.Tensor:
    """Where each choice's row is summed from: v >= 0 is row v of the receive buffer, -1 is no row, v < -1 is row -2 - v
    of this rank's own result.

    Args:
        experts: [T, k] int32 routes of this rank, -1 where dropped.
        routes: [W, W, E_local] routes from each rank to each expert of each rank.
        sent: for sums: [T, k] the sent row of each first choice on a rank, -1 elsewhere, and [W, W] rows that each rank
            sends to each rank.

    On rank 0 of 2 with one expert each, routes ``[[0, 1], [1, -1]]`` and one row of expert 0 from rank 1 before ours
    give slots ``[[-3, 0], [1, -1]]``; so they do for sums, where the sent rows are ``[[0, 1], [2, -1]]``.
    """
    num_local, mine = routes.shape[2], routes[:, rank]
    starts = np.cumsum(mine.sum(0)) - mine[rank]
    remote = routes[rank].copy()
    remote[rank] = 0
    places = np.cumsum(remote.flatten()) - remote.flatten()
    seen = np.zeros(places.shape, dtype=np.int64)
    slots = torch.full_like(experts, -1)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            if expert < 0:
                continue
            if expert // num_local == rank:
                slots[token, choice] = -2 - (starts[expert % num_local] + seen[expert])
            elif sent is None:
                slots[token, choice] = places[expert] + seen[expert]
            else:
                slot, before = int(sent[0][token, choice]), int(sent[1][rank, : rank + 1].sum())
                slots[token, choice] = slot - int(sent[1][rank, rank]) if slot >= before else slot
            seen[expert] += 1
    return slots
