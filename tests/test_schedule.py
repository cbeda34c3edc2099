"""The schedule of tiles, the segments and the slots: worked examples, what any routing must give, and the kernel."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from schedule_twins import assert_equals_twins

from ds_tileoverlap import placement, schedule, symmetric_layout
from ds_tileoverlap.exchange import Peers
from ds_tileoverlap.layout import Plan


def routes_of(seed, ranks, experts, tokens, top_k, skew=0.0):
    """[W, W, E_local] counts and every rank's [T, k] routes, some of them dropped."""
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.full(experts, 20.0)) * (1 - skew) + skew * (np.arange(experts) == 1)
    chosen = [
        np.stack([generator.choice(experts, top_k, replace=False, p=weights) for _ in range(max(tokens - 7 * r, 0))])
        if tokens > 7 * r
        else np.zeros((0, top_k), dtype=np.int64)
        for r in range(ranks)
    ]
    chosen = [np.where(generator.random(c.shape) < 0.1, -1, c) for c in chosen]
    counts = np.stack([np.bincount(c[c >= 0], minlength=experts) for c in chosen])
    return counts.reshape(ranks, ranks, -1).astype(np.int32), [torch.from_numpy(c).int() for c in chosen]


def test_worked_examples():
    assert schedule.plain_items(np.array([[40], [300]]), 0, 256, False) == [
        (0, 256, 0, 0, 0, True),
        (256, 84, 0, 0, 2, True),
    ]
    routes = np.zeros((2, 2, 1), dtype=int)
    routes[:, 0, 0] = 40, 300
    assert schedule.plain_segments(routes, 0, 4, False, 2) == [
        (0, 128, 1, 0, 0, 1, 0),
        (128, 128, 1, 128, 1, 1, 4),
        (256, 44, 1, 256, 2, 1, 8),
        (0, 0, 0, 0, 0, 0, 10),
    ]
    routes[:, :, 0] = [[1, 2], [1, 0]]
    experts = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    assert schedule.plain_slots(experts, routes, 0).tolist() == [[-3, 0], [1, -1]]
    sent = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    assert schedule.plain_slots(experts, routes, 0, (sent, np.array([[1, 2], [1, 0]]))).tolist() == [[-3, 0], [1, -1]]
    sends = np.array([[5, 1, 2], [3, 9, 4], [7, 6, 8]])
    assert schedule.plain_runs(sends, 1) == [(12, 4, 2, 2), (0, 3, 0, 0)]
    assert schedule.plain_runs(sends.T, 1) == [(10, 6, 2, 7), (0, 1, 0, 0)]
    assert schedule.plain_send_runs(sends, 1) == [(0, 3, 0, 0), (12, 4, 2, 2)]
    segments = [(0, 9, 1, 0, 0, 1, 0), (9, 9, 1, 9, 2, 1, 1), (18, 9, 0, 0, 2, 1, 2), (0, 0, 0, 0, 0, 0, 4)]
    assert schedule.plain_band_parts(segments, 3) == [1, 0, 3]
    assert schedule.gated_width(1408) == 2816
    assert [schedule.rows_of_part(row_bytes) for row_bytes in (4096, 20000, 100)] == [2, 1, 32]


def sent_of(chosen, ranks, experts):
    """The sent rows as the layout numbers them: each rank's [T, k] rows of first choices, and how many go where."""
    slots, sends = [], np.zeros((ranks, ranks), dtype=np.int64)
    for rank, routes in enumerate(chosen):
        counted = placement.count_routes(routes, experts, ranks)
        slots.append(placement.place_tokens(routes, torch.zeros(routes.shape), counted, ranks)[2])
        sends[rank] = counted.counts[experts:-1].numpy()
    return slots, sends


CASES = [(2, 8, 700, 2, 0.0), (2, 16, 300, 4, 0.6), (4, 8, 500, 3, 0.3), (8, 64, 260, 8, 0.0), (2, 4, 3, 2, 0.0)]


@pytest.mark.parametrize("panel_tiles", [0, 2])
@pytest.mark.parametrize("aligns_owners", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_is_computed_once_and_travels_once(case, aligns_owners, panel_tiles):
    ranks, width = case[0], 900
    routes, chosen = routes_of(1, *case)
    landed = [{} for _ in range(ranks)]
    for rank in range(ranks):
        mine = routes[:, rank]
        column_tiles, num_rows = -(-width // schedule.TILE_N), int(mine.sum())
        covered, bands = np.zeros((num_rows, column_tiles), dtype=int), {}
        stage = 0
        order = [(rank + 1 + i) % ranks for i in range(ranks)]
        owners = np.concatenate([np.repeat(order, mine[order, e]) for e in range(mine.shape[1])])
        for row, rows, _, column, band, of_remote in schedule.plain_items(
            mine, rank, width, aligns_owners, panel_tiles
        ):
            columns = [column] if rows > schedule.BAND else [c for c in (column, column + 1) if c < column_tiles]
            covered[row : row + rows, columns] += 1
            for start in range(0, rows, schedule.BAND):
                for c in columns:
                    bands.setdefault(band + start // schedule.BAND, set()).add((row + start, c))
            assert of_remote == (owners[row : row + rows] != rank).any()
            panel = {c // panel_tiles if panel_tiles else 0 for c in columns} if of_remote else {99}
            assert panel == {max(panel)} and max(panel) >= stage, "panel by panel, tiles without remote rows at the end"
            stage = max(panel)
        assert (covered == 1).all()
        assert all(len(tiles) == column_tiles for tiles in bands.values())
        assert all(len({row for row, _ in tiles}) == 1 for tiles in bands.values())
        first_rows = {band: next(iter(tiles))[0] for band, tiles in bands.items()}
        sent, parts = np.zeros(num_rows, dtype=int), 0
        *segments, end = schedule.plain_segments(routes, rank, 1000, aligns_owners, 3)
        for row, rows, peer, peer_row, band, num_bands, before in segments:
            assert rows > 0 and before == parts and (owners[row : row + rows] == peer).all()
            parts += -(-rows // schedule.rows_of_part(1000))
            sent[row : row + rows] += 1
            # The bands that it waits for hold all its rows.
            assert first_rows[band] <= row
            assert row + rows <= first_rows[band + num_bands - 1] + schedule.BAND
            for i in range(rows):
                assert landed[peer].setdefault(peer_row + i, (rank, row + i)) == (rank, row + i)
        assert end[-1] == parts and (sent == (owners != rank)).all()
        if not panel_tiles:
            check_arrivals(routes, rank, aligns_owners, owners, first_rows)
    check_sums(case, routes, chosen)
    # Every choice finds its own row: the one that the expert's rank made of that token.
    for rank in range(ranks):
        slots = schedule.plain_slots(chosen[rank], routes, rank)
        num_local, seen = routes.shape[2], {}
        for token, choices in enumerate(chosen[rank].tolist()):
            for choice, expert in enumerate(choices):
                slot = int(slots[token, choice])
                if expert < 0:
                    assert slot == -1
                    continue
                place = seen[expert] = seen.get(expert, -1) + 1
                home, local = expert // num_local, expert % num_local
                mine = routes[:, home]
                order = [(home + 1 + i) % ranks for i in range(ranks)]
                row = int(mine[:, :local].sum() + mine[order[: order.index(rank)], local].sum() + place)
                assert (landed[rank][slot] if home != rank else (rank, -2 - slot)) == (home, row)


def check_arrivals(routes, rank, aligns_owners, owners, first_rows):
    """The parts of a band are those of each peer's rows in it; no segment reaches beyond its band."""
    segments = schedule.plain_segments(routes, rank, 1000, aligns_owners, 1)
    parts = schedule.plain_band_parts(segments, len(first_rows))
    assert sum(parts) == segments[-1][-1]
    ends = [*(first_rows[band] for band in range(1, len(first_rows))), len(owners)]
    for band, end in enumerate(ends):
        of_band = owners[first_rows[band] : end]
        counts = [(of_band == peer).sum() for peer in range(len(routes)) if peer != rank]
        assert parts[band] == sum(-(-count // schedule.rows_of_part(1000)) for count in counts)


def check_sums(case, routes, chosen):
    """Each sum lands in the one row that its token's owner reads for that rank."""
    ranks, experts = case[:2]
    slots, sends = sent_of(chosen, ranks, experts)
    landed = [{} for _ in range(ranks)]
    for rank in range(ranks):
        for line, lines, peer, peer_row in schedule.plain_runs(sends.T, rank):
            assert line == sends[:peer, rank].sum() and lines == sends[peer, rank]
            for i in range(lines):
                assert landed[peer].setdefault(peer_row + i, (rank, i)) == (rank, i)
    arrived = [set() for _ in range(ranks)]
    for rank in range(ranks):
        for line, lines, peer, peer_row in schedule.plain_runs(sends, rank):
            assert line == sends[rank, :peer].sum() and lines == sends[rank, peer]
            rows = set(range(peer_row, peer_row + lines))
            assert not rows & arrived[peer]
            arrived[peer] |= rows
    for rank in range(ranks):
        assert arrived[rank] == set(range(sends[:, rank].sum() - sends[rank, rank]))
        found = schedule.plain_slots(chosen[rank], routes, rank, (slots[rank], sends))
        visits = 0
        for token, choices in enumerate(chosen[rank].tolist()):
            seen = {}
            for choice, expert in enumerate(choices):
                home, slot = expert // (experts // ranks), int(found[token, choice])
                if expert >= 0 and home != rank:
                    assert (slot >= 0) == (home not in seen)
                    if slot >= 0:
                        seen[home] = landed[rank].pop(slot)
                        assert seen[home][0] == home
            visits += len(seen)
        assert not landed[rank] and visits == sends[rank].sum() - sends[rank, rank]


@pytest.fixture
def dirty_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("aligns_owners,num_panels", [(False, 1), (True, 1), (False, 2), (False, 5)])
@pytest.mark.parametrize("width", [8, 512, 1288])
@pytest.mark.parametrize("case", [*CASES, (8, 512, 2000, 8, 0.2), (1, 4, 300, 2, 0.0), (64, 128, 600, 4, 0.0)], ids=str)
def test_kernel_equals_the_plain_twins(op, dirty_memory, case, width, aligns_owners, num_panels):
    """Schedules of rows that return and of rows that arrive, made at once."""
    ranks, experts, *_ = case
    routes, chosen = routes_of(2, *case)
    _, sends = sent_of(chosen, ranks, experts)
    counts = torch.zeros(ranks, experts + ranks + 1, dtype=torch.int32)
    counts[:, :experts] = torch.from_numpy(routes.reshape(ranks, -1))
    counts[:, experts:-1] = torch.from_numpy(sends)
    ways = [
        schedule.Returns(False, aligns_owners, 3, num_panels),
        replace(schedule.ARRIVALS, aligns_owners=aligns_owners, num_panels=num_panels),
        schedule.ARRIVALS,
    ]
    gemms = [(width + 8 * i, returns) for i, returns in enumerate(ways)]
    for rank in {0, ranks // 2, ranks - 1}:
        peers = Peers(None, rank, tuple(range(ranks)), 0.0, "test")
        plan = Plan(peers, counts, counts.cuda(), *[None] * 7)
        words = torch.zeros(8, dtype=torch.int32, device="cuda")
        group = SimpleNamespace(op=op, num_sms=2, pool=SimpleNamespace(claimed_items=words, failure=words))
        exchange = symmetric_layout.exchange_of(group, peers, plan.device_counts, experts, len(chosen[rank]), 1)
        for gemm, found in zip(gemms, schedule.schedules(op, exchange, plan, 2 * width, gemms), strict=True):
            assert (found.n, found.returns) == gemm
            assert_equals_twins(found, routes, sends, rank)
