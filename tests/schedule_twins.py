"""Whether the lists that the operator has made are those of their plain twins."""

from itertools import pairwise

from ds_tileoverlap import schedule

# In the order in which they lie.
LISTS = ("items", "num_items", "segments", "num_segments", "panel_tiles_to_do")


def assert_equals_twins(found, routes, sends, rank):
    returns, tiles, column_tiles = found.returns, found.returns.panel_tiles(found.n), -(-found.n // schedule.TILE_N)
    aligns_owners, bands = returns.aligns_owners, returns.bands_per_segment

    def lines(name, count, width=1):
        return [line if width > 1 else line[0] for line in found.list_at(name, width)[:count].tolist()]

    (num_items, num_segments) = (*lines("num_items", 1), *lines("num_segments", 1))
    items = schedule.plain_items(routes[:, rank], rank, found.n, aligns_owners, tiles, returns.local_first)
    got = lines("items", num_items, 4)
    assert [(r, n, z & 0x7FFF, z >> 16 & 0xFFFF, band, bool(z & 0x8000)) for r, n, z, band in got] == items
    segments = schedule.plain_segments(routes, rank, found.row_bytes, aligns_owners, bands)
    assert num_segments == len(segments) - 1
    assert [tuple(s[:7]) for s in lines("segments", len(segments), 8)] == segments
    room = {a: (getattr(found.native, b) - getattr(found.native, a)) // 4 for a, b in pairwise(LISTS)}
    assert len(items) * 4 <= room["items"] and len(segments) * 8 <= room["segments"]
    num_bands = max((band + 1 + (n > 128) for _, n, _, _, band, _ in items), default=0)
    assert num_bands <= found.native.num_bands
    if returns.local_first:
        assert num_bands < found.native.num_left
        assert lines("band_parts_to_do", num_bands) == schedule.plain_band_parts(segments, num_bands)
    expected = schedule.plain_runs(sends.T, rank), schedule.plain_send_runs(sends, rank)
    for name, plain in zip(("sum_runs", "send_runs"), expected):
        assert [tuple(run) for run in lines(name, len(sends) - 1, 4)] == plain
    to_do = [0] * returns.num_panels
    for _, rows, _, column, _, of_remote in items:
        for c in [column, column] if rows > schedule.BAND else [column, column + 1]:
            if of_remote and c < column_tiles:
                to_do[c // tiles] += 1
    assert lines("panel_tiles_to_do", returns.num_panels) == to_do
