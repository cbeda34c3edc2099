"""Traces: the kernels' events, emulated, against the Plan; clocks and numbers by hand; the files."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from emulated_op import build, hold_up
from emulated_ranks import GROUPS, GUARDS, E, H, ThreadPools, layer_of
from models import Gated, fill, mlp, stock, tokens

from ds_tileoverlap import cli, overlap_group, schedule, stages, symmetric_layout
from ds_tileoverlap.trace import perfetto, recorder, report
from ds_tileoverlap.trace.metrics import exposed_us, metrics, overlap_ratio, shared, union
from ds_tileoverlap.trace.recorder import EVENT, DeviceRecorder, Recording
from ds_tileoverlap.trace.timeline import Timeline, aligned, clock_offsets

pytestmark = pytest.mark.usefixtures("no_streams_and_dirty_memory")

FORWARD = ["moe", "route", "layout", "layout", "dispatch => expert_gemm", "expert_gemm => combine", "combine"]
BACK = ["combine backward => expert_gemm", "dispatch backward", "expert_gemm => dispatch backward"]
WEIGHTS = "expert_gemm weight gradients"
# Such that a GEMM has several columns of tiles.
INNER = 304


@pytest.fixture(scope="module")
def op(emulated):
    return emulated


class Ranges:
    """An accelerator's ranges for profilers: what each rank pushed, and how deep it is."""

    def __init__(self):
        self.names, self.depth = threading.local(), threading.local()

    def range_push(self, name):
        self.names.all = [*getattr(self.names, "all", []), name]
        self.depth.now = getattr(self.depth, "now", 0) + 1

    def range_pop(self):
        self.depth.now -= 1
        assert self.depth.now >= 0


def _traced(rank, group, peers, layers, lengths, capacity, ranges, slow):
    """One step unrecorded, one recorded: what was recorded, the Plan of that step, and the ranges of its profile."""
    GROUPS.local.group, runtime = group, layers[rank].deepspeed_moe.tile_overlap
    for step in range(2):
        if step == 1:
            hold_up(group.op, {"expert_gemm": 50.0} if slow and rank else {"*": 4.0}, seed=rank + 1)
            runtime.recorder = DeviceRecorder(group, peers, capacity)
            ranges.names.all = []
        x = tokens(rank + 10 * step, lengths[rank], hidden=H, dtype=torch.bfloat16).requires_grad_()
        layers[rank](x)[0].sum().backward()
        overlap_group.check_failure(group.pool.failure, peers)
    assert ranges.depth.now == group.pool.trace == 0
    recording = runtime.recorder.close(runtime.backend)
    return recording, PLANS[rank], ranges.names.all


PLANS = {}


def record(op, monkeypatch, size, expert, options, capacity=2**16, slow=False):
    """Of each rank the recording, the Plan and the ranges."""
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    ranges, finish = Ranges(), symmetric_layout.Counting.finish
    monkeypatch.setattr(stages, "get_accelerator", lambda: ranges)

    def noted(counting, *widths, **more):
        plan = PLANS[counting.peers.rank] = finish(counting, *widths, **more)
        return plan

    monkeypatch.setattr(symmetric_layout.Counting, "finish", noted)
    full = fill(stock(expert, num_experts=E, hidden=H), std=0.1).bfloat16()
    pools, lengths = ThreadPools(size, op), [330 - 60 * rank for rank in range(size)]
    layers = [layer_of(rank, pools.peers[rank], full, options, True) for rank in range(size)]
    return zip(*pools.run(_traced, layers, lengths, capacity, ranges, slow))


@pytest.mark.parametrize(
    "size,form,options",
    [
        (2, Gated, {"combine": "sums"}),
        (2, Gated, {"combine": "rows"}),
        (2, mlp, {"combine": "rows", "comm_sms": 2, "bands_per_segment": 1}),
        (4, Gated, {"combine": "sums", "recompute_dispatch": True}),
        (2, Gated, {"combine": "sums", "overlap_dispatch": False}),
    ],
    ids=str,
)
def test_events_are_those_of_the_plan_and_in_order(op, monkeypatch, size, form, options):
    recordings, plans, ranges = record(op, monkeypatch, size, form(H, INNER), options)
    again = ["dispatch again"] if options.get("recompute_dispatch") else []
    expected = FORWARD + BACK + [WEIGHTS, *again, WEIGHTS, "dispatch backward", "dispatch backward"]
    # All of them have the same clock here.
    timelines = [Timeline(recording, 0) for recording in recordings]
    for timeline, names in zip(timelines, ranges):
        assert [stage.name for stage in timeline.stages] == expected == names
        assert timeline.recording.lost == 0 and timeline.recording.backend == "overlap"
    check(timelines, plans, form is Gated)
    assert all(abs(offset) <= quickest(recordings, i) / 2 for i, offset in enumerate(clock_offsets(recordings)))
    found = metrics(aligned(recordings))
    assert {each.stage for each in found} == set(expected) and {each.rank for each in found} == set(range(size))
    for each in found:
        assert 0 <= each.exposed_us <= each.exchange_us
        assert (each.efficiency is not None) == ("=>" in each.stage) and 0 <= (each.efficiency or 0) <= 1
        assert (each.exchange_us > 0) == ("=>" in each.stage or each.stage == "dispatch again")
    assert 0 <= overlap_ratio(found) <= 1


def quickest(recordings, place):
    if place == 0:
        return 0
    asked = recordings[0].events[
        (recordings[0].events["kind"] == recorder.CLOCK) & (recordings[0].events["peer"] == place)
    ]
    assert len(asked) == recorder.CLOCK_ROUNDS
    return int((asked["end"] - asked["start"]).min())


def check(timelines, plans, gated):
    """Every stage in which an exchange meets a GEMM, on every rank."""
    for place, (timeline, plan) in enumerate(zip(timelines, plans)):
        for stage in timeline.stages:
            if stage.name.startswith("expert_gemm => "):
                check_return(stage, place, timelines, plan)
            elif stage.is_fused:
                is_forward = stage.name.startswith("dispatch")
                width = schedule.gated_width(INNER) if gated and is_forward else INNER
                check_arrival(stage, place, timelines, plan, width)


def of(events, stage, **fields):
    """The events of a stage, in which fields have these values."""
    chosen = events["stage"] == stage.index
    for name, value in fields.items():
        chosen &= events[name] == value
    return {name: values[chosen] for name, values in events.items()}


def tiles_of(plan, place, n, returns, width):
    """(band, column tile) -> whether its item has rows of other ranks, of a result with ``n`` tiles of columns."""
    panel, found = returns.panel_tiles(width), {}
    items = schedule.plain_items(plan.routes[:, place], place, width, returns.aligns_owners, panel, returns.local_first)
    for _, rows, _, tile, band, remote in items:
        shares = rows > schedule.BAND
        for band_, tile_ in ((band, tile), (band + 1, tile)) if shares else ((band, tile), (band, tile + 1)):
            if tile_ < n:
                found[band_, tile_] = remote
    return found


def made_tiles(timeline, stage):
    tiles = of(timeline.tiles, stage)
    return {
        (b, t): (c, e) for b, t, c, e in zip(*(tiles[name].tolist() for name in ("place", "piece", "consumed", "end")))
    }


def check_arrival(stage, place, timelines, plan, width):
    mine, expected = timelines[place], tiles_of(plan, place, -(-width // 256), schedule.ARRIVALS, width)
    made = made_tiles(mine, stage)
    assert made.keys() == expected.keys()
    segments = schedule.plain_segments(plan.routes, place, 2 * H, False, 1)
    placed = of(mine.placed, stage)
    assert len(placed["start"]) == segments[-1][6]
    assert len(of(mine.sent, stage)["start"]) == (sum(plan.remote_sends[place]) + 1) // 2
    for peer in set(range(len(timelines))) - {place}:
        arriving = of(timelines[peer].sent, timelines[peer].stages[mine.stages.index(stage)], peer=place)
        here = of(placed, stage, peer=peer)
        assert len(arriving["start"]) and len(here["start"])
        # With more ranks a part may hold a line for the next peer, too.
        assert arriving["end" if len(timelines) == 2 else "start"].max() <= here["start"].min(), "sent before it lands"
    for (band, _), (consumed, end) in made.items():
        landed = placed["end"][placed["place"] == band]
        assert not len(landed) or landed.max() <= consumed, "landed before it is consumed"
        assert consumed <= end


def check_return(stage, place, timelines, plan):
    mine, returns = timelines[place], plan.returns
    expected, made = tiles_of(plan, place, -(-H // 256), returns, H), made_tiles(mine, stage)
    assert made.keys() == expected.keys()
    sent = of(mine.sent, stage)
    if returns.sums:
        lines = sum(row[place] for row in plan.remote_sends)
        # The second panel of so few columns is empty.
        assert len(sent["start"]) == (lines + 1) // 2 and not sent["piece"].any()
        ready = max(made[tile][1] for tile, is_remote in expected.items() if is_remote)
    else:
        segments = schedule.plain_segments(plan.routes, place, 2 * H, returns.aligns_owners, returns.bands_per_segment)
        assert len(sent["start"]) == segments[-1][6] and (sent["piece"] == -1).all()
        bands = [range(s[4], s[4] + s[5]) for s in segments]
        ready = np.array([max(made[tile][1] for tile in made if tile[0] in bands[s]) for s in sent["place"].tolist()])
    assert (ready <= sent["start"]).all(), "ready before it is sent"
    home = mine.stages[mine.stages.index(stage) + 1 :]
    home = next(s for s in home if len(of(mine.arrived, s)["start"]))
    assert stage.name.endswith(f"=> {home.name}")
    arrived, summed = of(mine.arrived, home), of(mine.summed, home)
    for peer in set(range(len(timelines))) - {place}:
        coming = of(timelines[peer].sent, timelines[peer].stages[mine.stages.index(stage)], peer=place)
        assert coming["end" if len(timelines) == 2 else "start"].max() <= arrived["end"], "sent before it is there"
    # Eight CTAs an SM, of which these groups have four.
    assert sorted(summed["place"].tolist()) == list(range(32))
    assert (arrived["end"] <= summed["start"]).all()


@pytest.mark.parametrize(
    "guard,order",
    [
        ("tiles wait until what arrives is in place", "landed before it is consumed"),
        ("what arrives is read after it came", "sent before it lands"),
        ("couriers wait for finished tiles", "ready before it is sent"),
    ],
)
def test_a_wrong_order_shows(monkeypatch, tmp_path, guard, order):
    recordings, plans, _ = record(
        build(tmp_path, [GUARDS[guard]]), monkeypatch, 2, Gated(H, INNER), {"combine": "sums"}, slow=True
    )
    with pytest.raises(AssertionError, match=order):
        check([Timeline(recording, 0) for recording in recordings], plans, True)


def test_what_finds_no_room_is_counted(op, monkeypatch, tmp_path):
    expert = Gated(H, INNER)
    full, _, _ = record(op, monkeypatch, 2, expert, {"combine": "sums"})
    cut, _, _ = record(op, monkeypatch, 2, expert, {"combine": "sums"}, capacity=300)
    for all_of_it, part in zip(full, cut):
        assert len(part.events) == 300 and part.lost == len(all_of_it.events) - 300
    facts = report.write(cut, tmp_path, "trace")
    assert f"{facts['lost_events']} events found no room" in report.in_words(facts)


def test_files(op, monkeypatch, tmp_path):
    recordings, _, _ = record(op, monkeypatch, 2, Gated(H, INNER), {"combine": "rows"})
    facts = report.write(recordings, tmp_path, "trace")
    document = perfetto.read(tmp_path / "trace.json.gz")
    assert document["otherData"] == facts and facts["overlap_ratio"] == overlap_ratio(metrics(aligned(recordings)))
    events = document["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    for rank, timeline in enumerate(aligned(recordings)):
        mine = [e for e in slices if e["pid"] == rank]
        assert sum(e["cat"] == "tile" for e in mine) == len(timeline.tiles["end"])
        assert [e["name"] for e in mine if e["cat"] == "stage"] == [stage.name for stage in timeline.stages]
        for thread in {e["tid"] for e in mine}:
            check_nesting([(e["ts"], e["ts"] + e["dur"]) for e in mine if e["tid"] == thread])
    for category, kind in (("sent", recorder.SENT), ("landed", recorder.PLACED)):
        begun, ended = ({e["id"]: e for e in events if e["ph"] == ph and e.get("cat") == category} for ph in "be")
        assert begun.keys() == ended.keys() and all(begun[i]["ts"] <= ended[i]["ts"] for i in begun)
        parts = sum(e["args"]["parts"] for e in begun.values())
        assert parts == sum((recording.events["kind"] == kind).sum() for recording in recordings)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["trace.json.gz", "trace.png"]


def check_nesting(spans):
    ends = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6, "slices of a thread cross"
        ends.append(end)


# --- by hand ----------------------------------------------------------------------------------------------------------


def recording(rank, events, names, size=2, clock="device"):
    """Events: (kind, stage, place, piece, peer, sm, start, end)."""
    return Recording(
        rank, tuple(range(size)), clock, "overlap", [("", ""), *((n, "l") for n in names)], np.array(events, EVENT)
    )


def us(*values):
    return [value * 1000 for value in values]


def stage(index, start, end):
    return [
        (recorder.STAGE_BEGAN, index, 0, 0, -1, 0, *us(start, start)),
        (recorder.STAGE_ENDED, index, 0, 0, -1, 0, *us(end, end)),
    ]


def two_ranks_by_hand(ahead=0):
    """A stage of 100 us; the second rank's clock is so many us ahead. Asked at 1 and answered at 5, from 3."""

    def tile(band, sm, consumed, made):
        started = (recorder.TILE_STARTED, 1, band, 0, -1, sm, *us(0, consumed))
        return [started, (recorder.TILE_MADE, 1, band, 0, -1, sm, *us(made, made + 1))]

    clocks = [(recorder.CLOCK, 0, i, 0, 1, 0, *us(1, 5 + i)) for i in range(2)]
    first = [*clocks, *stage(1, 10, 110), *tile(0, 3, 30, 70), *tile(1, 4, 60, 100)]
    first += [(recorder.SENT, 1, 0, 0, 1, 3, *us(20, 50)), (recorder.PLACED, 1, 1, 0, 1, 3, *us(40, 65))]
    answers = [(recorder.CLOCK, 0, i, 0, 0, 0, *us(ahead + 2, ahead + 3 + 9 * i)) for i in range(2)]
    second = [*answers, *stage(1, ahead + 12, ahead + 90), (recorder.SENT, 1, 0, 0, 0, 3, *us(ahead + 15, ahead + 40))]
    return [recording(rank, events, ["dispatch => expert_gemm"]) for rank, events in enumerate((first, second))]


@pytest.mark.parametrize("ahead", [0, 5000])
def test_numbers_by_hand(ahead):
    recordings = two_ranks_by_hand(ahead)
    assert clock_offsets(recordings) == [0, 1000 * ahead]
    timelines = aligned(recordings)
    assert [t.stages[0].start for t in timelines] == us(0, 2) and timelines[0].sent["end"].tolist() == us(40)
    found, other = metrics(timelines)
    # Rows travel from 5 to 55, tiles are made from 20 to 90, of which each SM makes one for 40 of 100.
    assert found.exchange_us == 50 and found.exposed_us == 15 and found.overlap_ratio == 0.7
    assert found.compute_us == 40 and found.time_us == 100 and found.efficiency == 0.5
    # The other rank sends from 5 to 30, is sent rows from 10 to 40, and makes no tile.
    assert other.exchange_us == other.exposed_us == exposed_us([found, other]) == 35
    assert overlap_ratio([found, other]) == 1 - 50 / 85


def test_a_tile_starts_when_the_one_before_is_made():
    def tile(band, consumed, made):
        return [
            (recorder.TILE_STARTED, 1, band, 0, -1, 7, *us(0, consumed)),
            (recorder.TILE_MADE, 1, band, 0, -1, 7, *us(made, made)),
        ]

    def tiles_of(*tiles):
        events = [*stage(1, 0, 50), *(event for each in tiles for event in each)]
        return Timeline(recording(0, events, ["a => b"]), 0).tiles

    found = tiles_of(tile(4, 5, 20), tile(9, 10, 40))
    assert found["start"].tolist() == us(5, 20) and found["end"].tolist() == us(20, 40)
    # Two GEMMs of one stage have a tile in the same place; the start of one is lost.
    found = tiles_of(tile(4, 5, 20), tile(4, 30, 40), tile(5, 41, 50)[1:])
    assert found["start"].tolist() == us(5, 30) and found["end"].tolist() == us(20, 40)


def test_where_nothing_overlaps():
    names = ["dispatch", "expert_gemm", "combine"]
    events = [*stage(1, 0, 10), *stage(2, 10, 40), *stage(3, 45, 60)]
    found = metrics(aligned([recording(0, events, names, size=1, clock="host")]))
    assert [(m.exchange_us, m.exposed_us, m.overlap_ratio) for m in found] == [(10, 10, 0), (0, 0, None), (15, 15, 0)]
    assert overlap_ratio(found) == 0 and [m.compute_us for m in found] == [0, 30, 0]


def test_spans_by_hand():
    spans = np.array([[2, 5], [0, 3], [7, 8], [8, 9], [6, 6]])
    assert union(spans).tolist() == [[0, 5], [7, 9]]
    assert shared(np.array([[0, 5]]), np.array([[3, 9]])) == 2
    assert union(np.zeros((0, 2), dtype=int)).shape == (0, 2)


def test_a_clock_that_was_not_compared():
    first, second = two_ranks_by_hand()
    without = dataclasses.replace(second, events=second.events[second.events["kind"] != recorder.CLOCK])
    with pytest.raises(ValueError, match="the clock of rank 1 was not compared"):
        clock_offsets([first, without])


# --- on GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize("combine", ["rows", "sums"])
def test_on_gpus(tmp_path, capsys, combine):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"tile_overlap": {"combine": combine}}))
    shape = ["--shape", "H=2048,I=768,E=32,k=4,tokens=4096", "--ranks", "2", "--config", str(config)]
    assert cli.main(["trace", *shape, "--out", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backend"] == "overlap" and facts["clock"] == "device" and not facts["lost_events"]
    fused = [each for each in facts["stages"] if "=>" in each["stage"]]
    assert len(fused) == 8 and all(0 < each["efficiency"] <= 1 for each in fused)
    assert all(0 <= each["exposed_us"] <= each["exchange_us"] for each in fused) and facts["overlap_ratio"] > 0
    events = perfetto.read(tmp_path / "out" / "trace.json.gz")["traceEvents"]
    for rank in range(2):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert min(e["ts"] for e in slices) >= 0
        for thread in {e["tid"] for e in slices}:
            check_nesting([(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread])
