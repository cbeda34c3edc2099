"""What ``auto`` becomes: from a profile, alike on all ranks, never against what was measured, and cheap."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulated_ranks import GROUPS, E, H, ThreadPools, layer_of
from models import Gated, fill, mlp, ours, stock, tokens

from ds_tileoverlap import combine, dispatch, overlap_group, overlap_stages
from ds_tileoverlap.config import TileOverlapConfig
from ds_tileoverlap.exchange import Peers, peers_of
from ds_tileoverlap.planning import choices, confirm, fit, machine
from ds_tileoverlap.planning.choices import Choices, why_sequential
from ds_tileoverlap.planning.profile import DEFAULT, load
from ds_tileoverlap.planning.routing import Shape, Unevenness, balanced, draw
from ds_tileoverlap.symmetric_layout import SEGMENT_BYTES, choose_returns

RESULTS = Path(__file__).parents[1] / "examples" / "results"
RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("stages-*.json"))}
NAMES = ("hidden", "intermediate", "experts", "top_k", "tokens")
QWEN = Shape(2048, 768, 128, 8, 8192)

pytestmark = pytest.mark.usefixtures("no_streams_and_dirty_memory")


@pytest.fixture(scope="module")
def profile():
    return load(DEFAULT)


def with_rates(profile, **rates):
    return replace(profile, rates=replace(profile.rates, **rates))


# --- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 100, 2048, 8192, 32768])
@pytest.mark.parametrize("record", RECORDS)
def test_known_layers_keep_their_choices(profile, record, tokens):
    shape = replace(Shape(*(RECORDS[record]["shape"][name] for name in NAMES)), tokens=tokens)
    assert why_sequential(shape, 2, profile) is None
    assert profile.comm_sms == 0 and profile.segment_bytes == SEGMENT_BYTES
    tally = balanced(shape, 2).tally
    assert choose_returns(TileOverlapConfig(), tally, shape.row_bytes).sums == (shape.top_k == 8)


@pytest.mark.parametrize("record", RECORDS)
def test_no_decision_is_against_a_record(profile, record):
    """Whatever is predicted as slower by more than the margin was measured as slower."""
    stages = fit.measured(RECORDS[record])
    for one in stages:
        for other in stages:
            for a in fit.ARMS.keys() & one.times_us.keys():
                for b in fit.ARMS.keys() & other.times_us.keys():
                    if fit.ARMS[a](one.work, profile) > profile.margin * fit.ARMS[b](other.work, profile):
                        assert one.times_us[a] > other.times_us[b]


def slow_couriers(profile):
    """Rates under which the fused stages take longer than their parts one after the other."""
    return with_rates(profile, place_gbs=20.0, courier_sum_gbs=20.0, arrive_us=400.0)


def test_overlap_that_loses_is_switched_off(profile):
    found = why_sequential(QWEN, 2, slow_couriers(profile))
    assert found.startswith(f"profile {DEFAULT} predicts ")
    assert found.endswith(f"for the stages that exchange, and its error is at most {profile.error:.0%}")
    assert why_sequential(QWEN, 2, slow_couriers(profile), TileOverlapConfig(backend="overlap")) is None
    sure = replace(slow_couriers(profile), left_out_error=0.9)
    assert why_sequential(QWEN, 2, sure) is None


@pytest.mark.parametrize("slower,off", [(1.2, False), (1.4, True)])
def test_only_a_loss_beyond_the_error_counts(profile, monkeypatch, slower, off):
    monkeypatch.setattr(choices, "fused_us", lambda work, profile: slower * choices.sequential_us(work, profile))
    assert 1.2 < profile.margin < 1.4
    assert (why_sequential(QWEN, 2, profile) is not None) == off


@pytest.mark.parametrize(
    "changes,options",
    [
        (dict(num_ranks=4), {}),
        (dict(link_us=5.0), {}),
        (dict(link_gbs=100.0), {}),
        ({}, {"comm_sms": 8}),
        ({}, {"overlap_dispatch": False}),
    ],
    ids=str,
)
def test_what_was_not_measured_is_not_decided(profile, changes, options):
    changes, num_ranks = dict(changes), changes.get("num_ranks", 2)
    changes.pop("num_ranks", None)
    found = replace(slow_couriers(profile), **changes)
    assert why_sequential(QWEN, num_ranks, found, TileOverlapConfig(**options)) is None


def test_forward_alone_is_judged_where_backward_does_not_overlap(profile, monkeypatch):
    seen = []
    monkeypatch.setattr(choices, "fused_us", lambda work, profile: seen.append(work.stage.name) or 1.0)
    why_sequential(QWEN, 2, profile, TileOverlapConfig(overlap_backward=False, combine="sums"))
    assert seen == ["in", "down"]


def test_experts_without_a_gate_are_narrower(profile, monkeypatch):
    seen = {}
    monkeypatch.setattr(choices, "fused_us", lambda work, profile: seen.update({work.stage.name: work.tflop}) or 1.0)
    gated, plain = ((why_sequential(QWEN, 2, profile, gated=gated), dict(seen))[1] for gated in (True, False))
    assert gated["in"] == 2 * plain["in"] and gated["in back"] == 2 * plain["in back"]
    assert gated["down"] == plain["down"]


def test_segments_are_those_of_the_profile(profile):
    def of(profile):
        group, tally = overlap_group.Group(None, None, None, 132, profile), balanced(QWEN, 2).tally
        return choose_returns(TileOverlapConfig(), tally, 4096, group.segment_bytes).bands_per_segment

    assert [of(each) for each in (None, profile, replace(profile, segment_bytes=4 * SEGMENT_BYTES))] == [4, 4, 16]


def test_couriers_get_the_profile_s_sms(profile):
    def of(comm_sms, profile):
        group = overlap_group.Group(None, None, None, 132, profile)
        return overlap_stages.Run(group, TileOverlapConfig(comm_sms=comm_sms), None, None, None, {}, 128).comm_sms

    eight = replace(profile, comm_sms=8)
    assert [of("auto", None), of("auto", profile), of("auto", eight), of(0, eight), of(4, eight)] == [0, 0, 8, 0, 4]


def test_balanced_by_hand():
    plan = balanced(Shape(8, 8, 4, 2, 12), 2)
    assert plan.routes.tolist() == [[[6, 6], [6, 6]]] * 2 and plan.sends.tolist() == [[10, 10], [10, 10]]


@pytest.mark.parametrize("shape,num_ranks", [(QWEN, 2), (Shape(64, 64, 60, 5, 4001), 4), (Shape(64, 64, 8, 1, 777), 8)])
def test_balanced_is_what_is_drawn_on_average(shape, num_ranks):
    even, drawn = balanced(shape, num_ranks), draw(shape, num_ranks, Unevenness(), 0)
    assert even.routes.sum((1, 2)).tolist() == drawn.routes.sum((1, 2)).tolist()
    assert even.routes.max() - even.routes.min() <= 1
    assert even.sends.sum() == pytest.approx(drawn.sends.sum(), rel=0.02)


# --- of a layer -------------------------------------------------------------------------------------------------------


def choices_of(profile, name="layer", decided=None):
    group = overlap_group.Group(None, None, None, 132, profile, {} if decided is None else decided)
    experts = SimpleNamespace(down_shape=lambda: (2048, 768), form=SimpleNamespace(gate="gate"))
    return Choices(group, TileOverlapConfig(), experts, 128, 8, Peers(None, 0, (0, 1), 5.0, name))


def test_a_decision_is_taken_once(profile, monkeypatch):
    seen, decided = [], {}
    monkeypatch.setattr(choices, "why_sequential", lambda shape, *rest: seen.append(shape.tokens))
    first, second = (choices_of(profile, name, decided) for name in ("first", "second"))
    for most_routes in (65536, 64000, 50000, 90000):
        assert first.why_sequential(most_routes) is None
    assert seen == [8192]
    second.why_sequential(65536)
    assert seen == [8192], "layers of one shape decide together"
    for most_routes, size in ((0, 1), (1, 1), (8, 1), (16, 2), (2**30, 2**15)):
        first.why_sequential(most_routes)
        assert max(seen[1:], default=1) == size


def test_layers_that_lose_say_so_once(profile, capsys):
    decided = {}
    for name in ("layer", "another", "layer"):
        layer = choices_of(slow_couriers(profile), name, decided)
        assert layer.why_sequential(65536) and layer.why_sequential(65536)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "tile_overlap: MoE layers like 'layer' with about 8192 tokens a rank are sequential instead of overlap, "
        f"as profile {DEFAULT} predicts "
    )


def all_to_all_of(pools):
    """The sequential backend's exchange between ranks that are threads."""
    sent = [None] * pools.size

    def all_to_all_rows(rows, send_splits, recv_splits, peers, stage):
        sent[peers.rank] = rows.split(send_splits)
        pools.barrier.wait()
        received = torch.cat([parts[peers.rank] for parts in sent])
        pools.barrier.wait()
        return received

    return all_to_all_rows


def _forwards(rank, group, peers, layers, lengths, profile):
    GROUPS.local.group, layer, found = group, layers[rank], []
    group.profile = profile
    for step, length in enumerate(lengths):
        x = tokens(rank + 10 * step, length[rank], hidden=H, dtype=torch.float16).requires_grad_()
        y = layer(x)[0]
        y.sum().backward()
        found.append((layer.deepspeed_moe.tile_overlap.backend, x.detach(), y.detach()))
        overlap_group.check_failure(group.pool.failure, peers)
    return found, dict(group.decided)


@pytest.mark.parametrize("make", [lambda: Gated(H, 40), lambda: mlp(H, 40)], ids=["gated", "mlp"])
def test_ranks_decide_alike(emulated, monkeypatch, capsys, profile, make):
    """With many tokens overlap loses here, with few it does not; ranks have very different numbers of them."""
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    monkeypatch.setattr(
        choices,
        "fused_us",
        lambda work, profile: (2.0 if work.num_tokens > 64 else 0.5) * choices.sequential_us(work, profile),
    )
    full, pools = fill(stock(make(), num_experts=E, hidden=H), std=0.1).half(), ThreadPools(2, emulated)
    layers = [layer_of(rank, pools.peers[rank], full, {}, True) for rank in range(2)]
    for layer in layers:
        layer.deepspeed_moe.tile_overlap.config = TileOverlapConfig(enabled=True)
    for stage in (dispatch, combine):
        monkeypatch.setattr(stage, "all_to_all_rows", all_to_all_of(pools))
    lengths = [(40, 20), (7, 300), (300, 7), (0, 50), (300, 0)]
    (first, decided), (second, also) = pools.run(_forwards, layers, lengths, profile)
    backends = ["overlap", "sequential", "sequential", "overlap", "sequential"]
    assert [step[0] for step in first] == [step[0] for step in second] == backends
    assert decided == also and sorted(shape.tokens for shape, *_ in decided) == [32, 64, 256]
    lines = [line for line in capsys.readouterr().out.splitlines() if "instead of overlap" in line]
    assert len(lines) == 1 and "with about 256 tokens a rank are sequential" in lines[0]
    reference = ours(full.float(), "reference")
    for _, x, y in first + second:
        expected = reference(x.float())[0]
        assert not len(x) or (y.float() - expected).norm() <= 3e-3 * expected.norm()


def _rates_of(rank, asked):
    """What a rank gets to know; only the first one may look."""

    def find(name, here):
        assert rank == 0 and name == asked and here["ranks"] == 2
        return load(DEFAULT), ["a line"]

    machine.find, before = find, machine.find
    try:
        peers = peers_of(torch.distributed.group.WORLD, torch.device("cpu"), None, "test")
        reported, rates = overlap_group._gathered((None, "host", f"gpu{rank}"), peers, asked)
    finally:
        machine.find = before
    assert reported == [(None, "host", "gpu0"), (None, "host", "gpu1")]
    return rates


def _rates():
    return _rates_of(torch.distributed.get_rank(), "rates.yaml")


@pytest.mark.parametrize(
    "factors,part",
    [
        ((1.0, 1.0), None),
        ((1.4, 0.7), None),
        ((1.6, 1.0), "GEMM"),
        ((0.6, 1.0), "GEMM"),
        ((1.0, 1.6), "all-to-all"),
        ((1.0, 0.6), "all-to-all"),
    ],
)
def test_rates_of_another_machine_are_not_taken(profile, monkeypatch, capsys, factors, part):
    """The profile's own times, and some that are too far from them."""
    peers, predicted = Peers(None, 0, (0, 1), 5.0, "layer"), []

    def measured(work, *_):
        exchange = confirm.all_to_all_us(work.plan.remote_routes, work, profile)
        predicted.extend([confirm.gemm_us(work, profile, by_torch=True), exchange])
        return [factor * us for factor, us in zip(factors, predicted)]

    monkeypatch.setattr(confirm, "_measured_us", measured)
    found = overlap_group._confirmed(profile, peers, torch.device("cpu"))
    assert all(30 < us < 200 for us in predicted), "short, and long enough to be measured"
    if part is None:
        assert found is profile and not capsys.readouterr().out
    else:
        line = capsys.readouterr().out
        assert found is None and f"tile_overlap: profile {DEFAULT} is ignored, as " in line and part in line
        assert f'"profile": "{DEFAULT}" takes it all the same' in line


def _confirmed_worker():
    peers = peers_of(torch.distributed.group.WORLD, torch.device("cuda", torch.cuda.current_device()), None, "test")
    found, _ = machine.find("auto", machine.describe(peers.size))
    return found and confirm.why_not(found, peers, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu(2)
def test_two_gpus_are_as_fast_as_their_profile(two_gpus):
    assert two_gpus(_confirmed_worker) == [None, None]


def test_a_machine_that_cannot_be_described_has_no_rates(monkeypatch, capsys):
    def describe(num_ranks):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(machine, "describe", describe)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda everyone, ours, group: everyone.__setitem__(slice(None), [ours])
    )
    everyone, rates = overlap_group._gathered((None, "host", "gpu"), Peers(None, 0, (0,), 5.0, "test"), "auto")
    assert (everyone, rates) == ([(None, "host", "gpu")], None)
    assert capsys.readouterr().out == "tile_overlap: no profile, as RuntimeError: Could not determine home directory.\n"


def test_all_ranks_have_the_rates_of_the_first(two_ranks, profile):
    assert two_ranks(_rates) == [profile, profile]
