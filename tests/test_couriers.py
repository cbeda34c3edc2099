"""Dispatch and return while their timing is attacked: virtual ranks on one GPU or on the host, then two GPUs; compared
bit for bit.

That an attack would show a missing guard is proven by operators built without one: they give wrong sums, silently.
"""

import functools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
import virtual_ranks
from emulated_op import Host, build
from models import mlp, ours, stock
from virtual_ranks import GUARDS, HOME, STAGES, TOKENS, Late, ManyStreams, Use, play

from ds_tileoverlap import dispatch, exchange, overlap_group, symmetric_layout
from ds_tileoverlap.config import TileOverlapConfig
from ds_tileoverlap.overlap_stages import Operand, project_arriving, return_while_computed, run_of
from ds_tileoverlap.route import Routes
from ds_tileoverlap.schedule import ARRIVALS, Returns
from ds_tileoverlap.weight_maps import WeightMaps

# Returns(sums, aligns_owners, bands_per_segment, num_panels)
PACKED, ALIGNED, MERGED = Returns(False, False, 1, 1), Returns(False, True, 2, 1), Returns(False, False, 5, 1)
SUMS, PANELS, ALIGNED_SUMS = Returns(True, False, 1, 1), Returns(True, False, 1, 2), Returns(True, True, 1, 4)
ALL_RETURNS = [PACKED, ALIGNED, MERGED, SUMS, PANELS, ALIGNED_SUMS]
LATE_MS = 100.0
LIMIT_MS, HOST_LIMIT_MS = 200.0, 1_000.0


@pytest.fixture(scope="module")
def process(op):
    """A process for virtual ranks; ``op`` comes first, so that the operator is built outside its limits of time."""
    process = ManyStreams()
    yield process
    process.close()


@pytest.fixture(scope="module")
def broken(op, tmp_path_factory):
    """For each guard a process whose operator lacks it; all of them are built at once."""
    processes = {guard: ManyStreams() for guard in GUARDS}
    folders = [str(tmp_path_factory.mktemp("without")) for _ in GUARDS]

    def build(guard, folder):
        processes[guard](virtual_ranks.build_without, guard, folder, limit_s=500.0)

    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(build, GUARDS, folders))
        yield processes
    finally:
        for process in processes.values():
            process.close()


def play_on_host(op, uses, start=0, late=None, absent=(), limit_ms=60_000.0):
    """:func:`play` on the host, where kernels take longer."""
    return play(uses, start, late, absent, limit_ms, Host(op))


def fitting_host(use):
    """The use with about a tenth of the tokens, and short sums in its products."""
    return replace(use, lengths=tuple(-(-length // 10) for length in use.lengths), inner=24)


@pytest.fixture(params=[pytest.param("GPU", marks=pytest.mark.gpu(1)), "host"])
def anywhere(request):
    """play(uses, start, ..) on a machine, a use that fits it, and the limit of a wait there that nothing ends."""
    if request.param == "GPU":
        return functools.partial(request.getfixturevalue("process"), play), lambda use: use, LIMIT_MS
    return functools.partial(play_on_host, request.getfixturevalue("emulated")), fitting_host, HOST_LIMIT_MS


LENGTHS = (0, 1, 37, 128, 300, 513)
# Two ranks have experts of more than one band.
HOST_LENGTHS = {2: (0, 1, 37, 300), 4: (0, 5, 47), 8: (0, 5, 20)}


def some_uses(seed, ranks, count, lengths=LENGTHS, **options):
    """Uses with other tokens and routes each; some ranks have few tokens or none."""
    generator = random.Random(seed)
    lengths = [tuple(generator.choice(lengths) for _ in range(ranks)) for _ in range(count)]
    options = {"num_experts": 4 * ranks, "top_k": min(4, 2 * ranks), **options}
    return [Use(length, seed=1 + 100 * seed + i, **options) for i, length in enumerate(lengths)]


def assert_right(outcome):
    assert all(failure[0] == 0 for failure in outcome.failures), outcome
    assert not outcome.wrong and not outcome.left and not outcome.uneven, outcome


# --- the helper itself, on the host -----------------------------------------------------------------------------------


def plain_return(use):
    """Every rank's sums and the tokens that arrive there, moved by the schedule's tables alone."""
    cpu, ranks = torch.device("cpu"), range(use.num_ranks)
    routes = virtual_ranks.routes_of(use)
    placed = virtual_ranks.place(routes, use.num_experts)
    tokens = [virtual_ranks.tokens_of(use, rank, cpu).double() for rank in ranks]
    weights, local = virtual_ranks.weights_of(use, cpu).double(), use.num_experts // use.num_ranks
    tables = [virtual_ranks.tables_of(use, placed, rank, cpu, use.returns) for rank in ranks]
    counts = [virtual_ranks.received_rows(use, placed, of_tokens).sum(1) for of_tokens in (False, True)]
    received = [torch.full((count, use.width), float("nan")).double() for count in counts[0]]
    arrived = [torch.full((count, use.inner), float("nan")).double() for count in counts[1]]
    outputs = []
    for rank in ranks:
        rows, mine = placed.rows_of(rank, tokens), weights[rank * local : (rank + 1) * local]
        outputs.append(virtual_ranks.products_of(rows, placed.expert_counts(rank), mine))
        for row, num_rows, peer, peer_row, *_ in [] if use.returns.sums else tables[rank].segments[:-1].tolist():
            received[peer][peer_row : peer_row + num_rows] = outputs[rank][row : row + num_rows]
        for line, lines, peer, peer_row in tables[rank].sum_runs.tolist() if use.returns.sums else []:
            for i, named in enumerate(placed.choice_rows[rank][line : line + lines]):
                received[peer][peer_row + i] = outputs[rank][named[named >= 0].long()].sum(0)
        for line, lines, peer, peer_row in tables[rank].send_runs.tolist():
            sent = placed.sent_tokens[rank][line : line + lines].long()
            arrived[peer][peer_row : peer_row + lines] = tokens[rank][sent]
    sums = []
    for rank in ranks:
        lines = torch.cat([received[rank], outputs[rank], torch.zeros(1, use.width)])
        slots = virtual_ranks.slots_of(use, placed, routes, rank).long()
        at = torch.where(slots >= 0, slots, len(received[rank]) - 2 - slots)
        sums.append(lines[at.masked_fill(slots == -1, len(lines) - 1)].sum(1))
    return sums, arrived, [placed.received_of(rank, tokens) for rank in ranks]


@pytest.mark.parametrize("returns", [PACKED, ALIGNED, PANELS], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tables_move_every_row_to_where_it_is_summed(ranks, returns):
    use = Use((40, 7, 0, 33)[:ranks], returns, num_experts=8, top_k=2 if ranks == 4 else 3, inner=24, width=16)
    use = replace(use, at_home=(1,) if ranks > 1 else ())
    routes, cpu = virtual_ranks.routes_of(use), torch.device("cpu")
    local = use.num_experts // ranks
    assert all(((r == -1) | (r // local == rank)).all() for rank, r in enumerate(routes) if rank in use.at_home)
    for rank, (sums, arrived, received) in enumerate(zip(*plain_return(use))):
        x, weights = virtual_ranks.tokens_of(use, rank, cpu), virtual_ranks.weights_of(use, cpu)
        assert torch.equal(sums.to(use.dtype), virtual_ranks.expected_sums(x, routes[rank], weights))
        # This rank's own tokens are in place.
        assert torch.equal(arrived, torch.cat([x[:0].double(), *received[:rank], *received[rank + 1 :]]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_segments_are_the_rows_that_arrive(ranks):
    use = Use((300, 7, 0, 260)[:ranks], num_experts=8, inner=24)
    placed = virtual_ranks.place(virtual_ranks.routes_of(use), use.num_experts)
    for rank in range(ranks):
        tables = virtual_ranks.tables_of(use, placed, rank, torch.device("cpu"), ARRIVALS)
        peers = torch.full_like(placed.row_sources[rank], rank)
        for row, rows, peer, *_ in tables.segments[:-1].tolist():
            peers[row : row + rows] = peer
        senders = torch.arange(ranks).repeat_interleave(torch.from_numpy(placed.sends[:, rank].copy()))
        assert torch.equal(peers, senders[placed.row_sources[rank].long()].int())


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_found_in_the_sources(tmp_path, guard):
    intact = {source.name: source.read_text() for source in virtual_ranks.builders._csrc().iterdir()}
    virtual_ranks.sources_without(guard, str(tmp_path))
    changed = {name for name, text in intact.items() if (tmp_path / "csrc" / name).read_text() != text}
    assert changed == {name for name, *_ in GUARDS[guard]}


# --- virtual ranks on one GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
def test_streams_do_not_hold_up_each_other(process):
    """What all tests below rest on: where this fails, ranks wait for each other in ways that two GPUs would not."""
    assert process(virtual_ranks.streams_that_hold_up_others, LATE_MS) == []


@pytest.mark.gpu(1)
@pytest.mark.parametrize("comm_sms", [0, 4])
@pytest.mark.parametrize("returns", ALL_RETURNS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_routing_changes_from_use_to_use(process, ranks, returns, comm_sms):
    uses = some_uses(ranks, ranks, 6, returns=returns, comm_sms=comm_sms, width=1288)
    assert_right(process(play, uses, -3 if comm_sms else 0))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tokens_go_out(process, ranks, dtype, overlaps):
    options = dict(stages=TOKENS, dtype=dtype, overlaps_dispatch=overlaps)
    uses = [
        replace(use, inner=(200, 8, 1032)[i % 3]) for i, use in enumerate(some_uses(20 + ranks, ranks, 6, **options))
    ]
    assert_right(process(play, uses, -3))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("start", [0, -3])
def test_everything_changes_from_use_to_use(process, ranks, start):
    """As layers of all kinds that share the buffers; with -3 every counter wraps on the way."""
    widths, inners, halves = (8, 264, 2056, 520, 1032), (8, 72, 512), (torch.bfloat16, torch.float16)
    uses = [
        replace(
            use,
            stages=(STAGES, HOME, STAGES, TOKENS)[i % 4],
            returns=ALL_RETURNS[i % len(ALL_RETURNS)],
            comm_sms=(0, 2, 4)[i % 3] if i % 2 else 0,
            overlaps_dispatch=i % 8 != 4,
            width=widths[i % len(widths)],
            inner=inners[i % len(inners)],
            dtype=halves[i % len(halves)],
            num_experts=ranks * (1, 3, 8)[i % 3],
            top_k=(1, 2, min(8, ranks * 3))[(i + 1) % 3] if i % 3 else 1,
            skew=(0.0, 0.5, 2.0)[i % 3],
        )
        for i, use in enumerate(some_uses(7, ranks, 13))
    ]
    assert_right(process(play, uses, start))


@pytest.mark.parametrize("returns", [PACKED, SUMS], ids=str)
def test_a_token_of_32_choices(anywhere, returns):
    play, fitting, _ = anywhere
    uses = some_uses(3, 2, 2, returns=returns, num_experts=64, top_k=32, width=264)
    uses.append(Use((65, 200), returns, num_experts=64, top_k=32, width=264, seed=9))
    assert_right(play([fitting(use) for use in uses]))


@pytest.mark.parametrize("returns", ALL_RETURNS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_everything_changes_from_use_to_use_on_the_host(emulated, ranks, returns):
    """Rows and panels are wider than the couriers' memory, and every counter wraps on the way."""
    uses = [
        replace(
            use,
            stages=(STAGES, HOME, TOKENS)[i % 3],
            comm_sms=(0, 4)[i % 2],
            width=(1032, 520, 264)[i % 3],
            inner=(24, 8, 72)[i % 3],
            dtype=(torch.bfloat16, torch.float16)[i // 2 % 2],
            top_k=(8, 3, 1)[i % 3],
        )
        for i, use in enumerate(some_uses(110 + ranks, ranks, 6, HOST_LENGTHS[ranks], returns=returns))
    ]
    assert_right(play_on_host(emulated, uses, -3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inner,overlaps", [(264, True), (520, True), (2056, False)])
def test_tokens_longer_than_the_memory_of_a_courier(emulated, inner, overlaps, dtype):
    """Half of it is 1024 bytes for couriers of the emulated GEMM, and 4096 for those that have SMs of their own."""
    options = dict(stages=TOKENS, dtype=dtype, overlaps_dispatch=overlaps, inner=inner, width=8)
    uses = some_uses(5, 2, 4, HOST_LENGTHS[2], **options)
    assert_right(play_on_host(emulated, uses, -3))


MODES = [(HOME, PACKED, 0), (HOME, ALIGNED, 4), (STAGES, PANELS, 0), (HOME, SUMS, 4), (TOKENS, SUMS, 0)]
FIRST = (TOKENS[0], HOME[0])
# (use, rank, stage, last rank) -> milliseconds.
ATTACKS = {
    "late GEMM": lambda use, rank, stage, last: 5.0 if rank == last and stage in ("project", "gemm") else 0.0,
    "late couriers": lambda use, rank, stage, last: 5.0 if (rank, stage) == (0, "couriers") else 0.0,
    "late reader": lambda use, rank, stage, last: 5.0 if (rank, stage) == (last, "sum") else 0.0,
    "very late rank": lambda use, rank, stage, last: 200.0 if (use, rank) == (2, last) and stage in FIRST else 0.0,
    "all late": lambda use, rank, stage, last: random.Random(f"{use} {rank} {stage}").choice([0.0, 0.02, 0.3, 4.0]),
}
# Couriers that are warps of the GEMM cannot be later than it; a GEMM reads what its couriers put in place.
HITS = {"late couriers": lambda stages, comm_sms: comm_sms, "late reader": lambda stages, comm_sms: stages != TOKENS}
ATTACKED_MODES = [(a, s, r, c) for a in ATTACKS for s, r, c in MODES if a not in HITS or HITS[a](s, c)]


def late_places(attack, uses):
    """All that an attack holds up."""
    ranks = uses[0].num_ranks
    places = [(u, rank, stage) for u in range(len(uses)) for rank in range(ranks) for stage in STAGES]
    return {(u, r, s): ms for u, r, s in places if (ms := ATTACKS[attack](u, r, s, ranks - 1))}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("traffic", ["all ways", "one way"])
@pytest.mark.parametrize("attack,stages,returns,comm_sms", ATTACKED_MODES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_whatever_is_late(process, ranks, attack, stages, returns, comm_sms, traffic):
    at_home = (0,) if traffic == "one way" else ()
    options = dict(stages=stages, returns=returns, comm_sms=comm_sms, at_home=at_home)
    uses = [replace(use, lengths=(300,) * ranks) for use in some_uses(11, ranks, 6, **options)]
    assert_right(process(play, uses, 0, late_places(attack, uses)))


@pytest.mark.parametrize("attack,stages,returns,comm_sms", ATTACKED_MODES, ids=str)
@pytest.mark.parametrize("ranks,at_home", [(2, (0,)), (4, ())], ids=["2 ranks, one way", "4 ranks, all ways"])
def test_whatever_is_late_on_the_host(emulated, ranks, at_home, attack, stages, returns, comm_sms):
    options = dict(stages=stages, returns=returns, comm_sms=comm_sms, at_home=at_home)
    uses = [fitting_host(replace(use, lengths=(200,) * ranks)) for use in some_uses(11, ranks, 4, **options)]
    assert_right(play_on_host(emulated, uses, 0, late_places(attack, uses)))


# Rank 0 has much to do from its first panel of two to its second, and little to send of each.
LONG_PANELS = dict(comm_sms=4, num_experts=128, width=1024, inner=2048)
HOST_LONG_PANELS = dict(lengths=(120, 16), at_home=(0,), width=1024, inner=2048)


def attack_on(guard, stages, returns, lengths=(300, 260), late_ms=LATE_MS, long_panels=LONG_PANELS):
    """Uses and delays under which nothing but the guard keeps a result right, and the result that is wrong without."""
    uses = [Use(lengths, returns, stages, seed=20 + i) for i in range(4)]
    if guard == "sums load ahead from ready panels":
        # Couriers that have waited for the first panel are through with it before the second one is made.
        return [replace(uses[0], **long_panels)], {(0, 0, "gemm"): late_ms}, (0, 1, "sums")
    if guard == "couriers wait for consumed":
        # Only rank 0 sends anything: it does not wait for the other before it writes to a half once more.
        return [replace(use, at_home=(0,)) for use in uses], {(0, 1, "sum"): 2 * late_ms}, (0, 1, "sums")
    if stages == TOKENS:
        result = "gathered" if guard == "couriers wait for arrived" else "hidden"
        return uses, {(0, 1, "project"): late_ms}, (0, 0, result)
    if guard == "the sum waits for arrived":
        return uses, {(0, 1, "gemm"): late_ms}, (0, 0, "sums")
    late = 1 if guard == "signals are stamped with the epoch" else 0
    return [replace(use, comm_sms=4) for use in uses], {(late, 0, "gemm"): late_ms}, (late, 1, "sums")


# Sums do not read ready signals, as tiles are counted for them. Tokens that go out wait for no tile, nor for a peer to
# have read: it has, when it begins the next use.
ATTACKED = [
    ("couriers wait for ready signals", HOME, PACKED),
    ("couriers wait for ready signals", HOME, SUMS),
    ("couriers wait for consumed", HOME, PACKED),
    ("couriers wait for consumed", HOME, SUMS),
    ("couriers wait for arrived", TOKENS, SUMS),
    ("bands are waited for", TOKENS, SUMS),
    ("the sum waits for arrived", HOME, PACKED),
    ("the sum waits for arrived", HOME, SUMS),
    ("signals are stamped with the epoch", HOME, PACKED),
    ("sums load ahead from ready panels", HOME, PANELS),
]


def assert_needed(outcome, hit):
    """The outcome of an attack without its guard."""
    assert all(failure[0] == 0 for failure in outcome.failures), outcome
    assert hit in outcome.wrong, f"the attack does no harm without the guard: {outcome}"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("guard,stages,returns", ATTACKED, ids=str)
def test_every_guard_is_needed(process, broken, guard, stages, returns):
    uses, late, hit = attack_on(guard, stages, returns)
    assert_right(process(play, uses, 0, late))
    assert_needed(broken[guard](play, uses, 0, late), hit)


@pytest.fixture(scope="module")
def emulated_without(tmp_path_factory):
    return functools.cache(lambda guard: build(tmp_path_factory.mktemp("without"), GUARDS[guard]))


# The emulation has a GEMM of its own.
EMULATED = [case for case in ATTACKED if all(name != "expert_gemm.cu" for name, *_ in GUARDS[case[0]])]


@pytest.mark.parametrize("guard,stages,returns", EMULATED, ids=str)
def test_every_guard_is_needed_on_the_host(emulated, emulated_without, guard, stages, returns):
    uses, late, hit = attack_on(guard, stages, returns, (30, 26), 300.0, HOST_LONG_PANELS)
    assert_right(play_on_host(emulated, uses, 0, late))
    assert_needed(play_on_host(emulated_without(guard), uses, 0, late), hit)


def test_every_guard_is_attacked():
    assert {guard for guard, *_ in ATTACKED} == set(GUARDS)


# --- a peer that never comes ------------------------------------------------------------------------------------------

TILE_READY, PEER_CONSUMED, ROWS_ARRIVED, PEER_BEGAN = 1, 2, 3, 6


def assert_in_time(elapsed_ms, limit_ms):
    """One limit and what the kernels take; not one limit after the other, of which eight ranks would need seven."""
    # The threads of the host share its cores with whatever else runs there.
    most = 4.0 if limit_ms == HOST_LIMIT_MS else 2.0
    assert 0.9 * limit_ms <= elapsed_ms <= most * limit_ms, elapsed_ms


@pytest.mark.parametrize("returns,comm_sms", [(PACKED, 0), (SUMS, 4)], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_never_comes(anywhere, ranks, returns, comm_sms):
    play, fitting, limit_ms = anywhere
    use = fitting(Use((100,) * ranks, returns, comm_sms=comm_sms, num_experts=2 * ranks, skew=0.0))
    last = ranks - 1
    outcome = play([use], 0, None, {(0, last, stage) for stage in STAGES}, limit_ms)
    due = virtual_ranks.received_rows(use, virtual_ranks.place(virtual_ranks.routes_of(use), use.num_experts))
    for rank in range(last):
        target = int(due[rank, last]) * use.row_bytes // 16
        assert target and outcome.failures[rank] == (ROWS_ARRIVED, last, 0, target, 0), outcome
        assert (0, rank) in outcome.nan, "nobody may train on sums without all their rows"
        assert_in_time(outcome.elapsed_ms[rank], limit_ms)
    assert outcome.failures[last][0] == 0 and not outcome.left, outcome


@pytest.mark.parametrize("returns,comm_sms", [(PACKED, 0), (SUMS, 4)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_that_never_read(anywhere, ranks, returns, comm_sms):
    """Rank 0 gets nothing from the others and comes to the third use; until then both halves were free."""
    play, fitting, limit_ms = anywhere
    options = dict(returns=returns, comm_sms=comm_sms, num_experts=4 * ranks, width=2056, at_home=(0,))
    uses = [fitting(Use((600,) * ranks, seed=40 + i, **options)) for i in range(3)]
    absent = {(u, rank, stage) for u in range(3) for rank in range(1, ranks) for stage in STAGES}
    outcome = play(uses, 0, None, absent, limit_ms)
    kind, peer, _, expected, seen = outcome.failures[0]
    assert kind == PEER_CONSUMED and 1 <= peer < ranks and (expected, seen) == (1, 0), outcome
    # What was done before is right; nobody may train on what comes after a wait that was given up.
    assert not any((u, 0, "sums") in outcome.wrong for u in range(2)) and not outcome.left, outcome
    assert (2, 0) in outcome.nan, outcome
    assert_in_time(outcome.elapsed_ms[0], limit_ms)


@pytest.mark.parametrize("returns", [PACKED, ALIGNED, SUMS, PANELS], ids=str)
def test_a_gemm_that_never_comes(anywhere, returns):
    play, fitting, limit_ms = anywhere
    use = fitting(Use((300, 300), returns, comm_sms=4))
    outcome = play([use], 0, None, {(0, 0, "gemm")}, limit_ms)
    assert outcome.failures[0][:2] == (TILE_READY, 0), outcome
    assert outcome.failures[1][:2] == (ROWS_ARRIVED, 0), outcome
    assert {(0, 0), (0, 1)} <= outcome.nan and not outcome.left, outcome
    for elapsed_ms in outcome.elapsed_ms:
        assert_in_time(elapsed_ms, limit_ms)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("absent", [TOKENS, TOKENS[1:]], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
def test_tokens_that_never_come(anywhere, ranks, absent, overlaps):
    """A rank that does not begin is missed before any GEMM starts, one that does not send under it: both are named."""
    play, fitting, limit_ms = anywhere
    use = fitting(Use((100,) * ranks, stages=TOKENS, overlaps_dispatch=overlaps, num_experts=2 * ranks, skew=0.0))
    last, placed = ranks - 1, virtual_ranks.place(virtual_ranks.routes_of(use), use.num_experts)
    outcome = play([use], 0, None, {(0, last, stage) for stage in absent}, limit_ms)
    for rank in range(last):
        target = int(virtual_ranks.received_rows(use, placed, of_tokens=True)[rank, last]) * use.token_bytes // 16
        named = (PEER_BEGAN, last, 0, 1, 0) if absent == TOKENS else (ROWS_ARRIVED, last, 0, target, 0)
        assert target and outcome.failures[rank] == named, outcome
        assert_in_time(outcome.elapsed_ms[rank], limit_ms)
    assert outcome.failures[last][0] == 0 and not outcome.left, outcome


# --- two GPUs ---------------------------------------------------------------------------------------------------------


class OwnGroup:
    """``with`` a group of all ranks that has its own symmetric memory, freed at the end: other tests keep theirs."""

    def __enter__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        members = list(range(torch.distributed.get_world_size()))
        self._group = torch.distributed.new_group(members, timeout=timedelta(seconds=60))
        self.peers = exchange.peers_of(self._group, self.device, None, "test")
        self.group = overlap_group.group_of(self.peers, self.device)
        assert self.group.op is not None, self.group.reason
        self._maps = WeightMaps()
        return self

    def __exit__(self, kind, error, trace):
        # After an error the ranks are not together any more, and their processes end anyway.
        if error is None:
            self.check()
            overlap_group._GROUPS.pop(self._group).pool.close()

    def check(self):
        torch.cuda.synchronize()
        overlap_group.check_failure(self.group.pool.failure, self.peers)

    def plan(self, experts, num_experts, returns):
        """All ranks call this alike: where there is no room for the routes, they make it together."""
        routes = Routes(experts, torch.ones(experts.shape, device=self.device), None, None)
        config = TileOverlapConfig(enabled=True, combine="sums" if returns.sums else "rows")
        plan = symmetric_layout.Counting(
            routes, num_experts, self.peers, self.group, config, 16, can_overlap=True
        ).finish()
        return plan.but(returns=returns)

    def operand(self, weights):
        """This rank's weights [E_local, N, K]. Their table is made here, as the host waits for the device then."""
        operand = Operand(f"test {weights.data_ptr()}", [(0, len(weights), weights)], transposed=False)
        self._maps.of(self.group.op, operand.name, operand.stack, weights.dtype, operand.transposed)
        return operand

    def reserve(self, plans, row_bytes, token_bytes):
        """Makes room for the largest, so that no use has to wait until all ranks grow together."""
        home = [symmetric_layout.rows_to_receive(plan)[0] for plan in plans]
        out = [plan.tally.most_arriving for plan in plans]
        pool = self.group.pool
        for channel, counts, sizes in ((pool.returns, home, row_bytes), (pool.tokens, out, token_bytes)):
            most = max(count * size for count, size in zip(counts, sizes))
            channel.reserve(most, most)

    def _run(self, plan, row_bytes, gemm, op, **options):
        config = TileOverlapConfig(enabled=True, **options)
        return run_of(plan, replace(self.group, op=op or self.group.op), config, self._maps, row_bytes, [gemm])

    def send(self, plan, x, operand, op=None, **options):
        """The rows [R, K] of all ranks' tokens for this rank's experts; their products [R, N], made as they come."""
        run = self._run(plan, 2 * x.shape[1], (operand.width, ARRIVALS), op, **options)
        (products,), rows = project_arriving(x, [operand], plan, run)
        return rows, products

    def bring_home(self, plan, rows, operand, op=None, **options):
        """[T, N], rows [R, K] times this rank's weights, brought home as ``plan.returns`` says."""
        run = self._run(plan, 2 * operand.width, (operand.width, plan.returns), op, **options)
        return return_while_computed([(rows, operand)], plan, run, lambda stage: nullcontext(), "combine")


def _late_on_two_gpus(seed):
    with OwnGroup() as own, torch.cuda.stream(torch.cuda.Stream()):
        rank, size, device = own.peers.rank, own.peers.size, own.device
        generator = random.Random(10 * seed + rank)
        uses = [
            replace(use, returns=ALL_RETURNS[i % 6], comm_sms=(0, 2, 8)[i % 3], width=(520, 1288)[i % 2])
            for i, use in enumerate(some_uses(seed, size, 24))
        ]
        ready = []
        for use in uses:
            experts = virtual_ranks.routes_of(use)[rank].to(device)
            x, weights = virtual_ranks.tokens_of(use, rank, device), virtual_ranks.weights_of(use, device)
            plan, local = own.plan(experts, use.num_experts, use.returns), use.num_experts // size
            mine, rows = weights[rank * local : (rank + 1) * local].clone(), dispatch.send_tokens(x, plan, "dispatch")
            products = virtual_ranks.products_of(rows, plan.expert_counts, mine)
            expected = rows, products, virtual_ranks.expected_sums(x, experts, weights)
            ready.append((plan, x, own.operand(mine), expected))
        own.reserve([plan for plan, *_ in ready], [u.row_bytes for u in uses], [u.token_bytes for u in uses])
        torch.cuda.synchronize()
        got = []
        for i, (use, (plan, x, operand, _)) in enumerate(zip(uses, ready)):
            names = (
                "project_arriving",
                "arrive",
                "multiply",
                "multiply_returning",
                "run_couriers_home",
                "sum_returned",
            )
            delays = {name: generator.choice([0.0, 0.05, 3.0]) for name in names}
            late = Late(own.group.op, own.group.pool.stream, delays)
            rows, products = own.send(plan, x, operand, late, overlap_dispatch=i % 4 != 3)
            got.append((rows, products, own.bring_home(plan, rows, operand, late, comm_sms=use.comm_sms)))
        own.check()
        # Rows that came, their products, sums that came home.
        right = [tuple(map(torch.equal, results, expected)) for results, (*_, expected) in zip(got, ready)]
        wrong = [(use, *three) for use, three in zip(uses, right) if not all(three)]
        assert not wrong, wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_is_late_on_two_gpus(two_gpus, seed):
    two_gpus(_late_on_two_gpus, seed)


# The shapes of the paper (arXiv 2607.19539); half of all rows to one rank is its hardest router.
PAPER_K, PAPER_TOP_K = 2048, 2
PAPER_TOKENS, PAPER_N, PAPER_EXPERTS = (8192, 16384), (4096, 8192), (4, 8, 16, 32, 64)
PAPER_COMM_SMS, PAPER_BANDS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24), (1, 2)
ROUTERS = ("balanced", "moderate skew", "stress skew")
LIMIT = 8e-3


def router_of(router, num_tokens, num_experts, generator, device):
    """[T, 2] distinct experts; under stress every first choice, which is half of all rows, is one of rank 0's."""
    noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts, generator=generator, device=device)))
    if router == "moderate skew":
        noise -= torch.log(1.0 + torch.arange(num_experts, device=device)) / 2
    chosen = noise.topk(PAPER_TOP_K, 1).indices
    if router == "stress skew":
        first = noise[:, : num_experts // 2].argmax(1, keepdim=True)
        second = noise.scatter(1, first, float("-inf")).argmax(1, keepdim=True)
        chosen = torch.cat([first, second], 1)
    return chosen.int()


def reference_of(x, experts, weights):
    """[T, N] float32: each row by torch's grouped GEMM where its token is, without any exchange, summed in float32."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=len(weights)).cumsum(0, dtype=torch.int32)
    rows = F.grouped_mm(x[order // PAPER_TOP_K], weights.transpose(1, 2), offs=ends)
    by_choice = torch.empty_like(rows)
    by_choice[order] = rows
    return by_choice.view(len(x), PAPER_TOP_K, -1).sum(1, dtype=torch.float32)


def _paper_grid():
    errors, cases, differing = [], [], []
    with OwnGroup() as own:
        rank, device = own.peers.rank, own.device
        for width in PAPER_N:
            for local in PAPER_EXPERTS:
                num_experts = 2 * local
                generator = torch.Generator(device).manual_seed(1000 * width + local)
                weights = torch.empty(num_experts, width, PAPER_K, dtype=torch.bfloat16, device=device)
                weights.normal_(std=0.02, generator=generator)
                mine = weights[rank * local : (rank + 1) * local]
                for num_tokens in PAPER_TOKENS:
                    for router in ROUTERS:
                        generator.manual_seed(10 * num_tokens + rank)
                        x = torch.empty(num_tokens, PAPER_K, dtype=torch.bfloat16, device=device)
                        x.normal_(generator=generator)
                        experts = router_of(router, num_tokens, num_experts, generator, device)
                        case = (num_tokens, width, local, router)
                        found = _paper_problem(own, x, experts, weights, mine)
                        for options, error, differs in found:
                            cases.append((*case, *options))
                            errors.append(error)
                            differing.append(differs)
                del weights, mine
        errors, differing = torch.stack(errors).tolist(), torch.stack(differing).tolist()
    wrong = [case for case, error in zip(cases, errors) if not error <= LIMIT]
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[:5]}"
    unequal = [case for case, differs in zip(cases, differing) if differs]
    assert not unequal, f"not bit for bit as with other options: {len(unequal)}, the first: {unequal[:5]}"
    return len(cases), max(errors), cases[errors.index(max(errors))]


def _paper_problem(own, x, experts, weights, mine):
    """Every way in which one problem's rows can come home: (options, largest error of a token, whether bits differ)."""
    by_sums = {sums: own.plan(experts, len(weights), Returns(sums, False, 1, 1)) for sums in (False, True)}
    rows, operand = dispatch.send_tokens(x, by_sums[False], "dispatch"), own.operand(mine)
    reference = reference_of(x, experts, weights)
    size = torch.linalg.vector_norm(reference, dim=1)
    ways = [(Returns(False, a, b, 1), c) for a in (True, False) for b in PAPER_BANDS for c in (0, *PAPER_COMM_SMS)]
    ways += [(Returns(True, False, 1, panels), c) for panels in (1, 4) for c in (0, 8)]
    plans = [by_sums[returns.sums].but(returns=returns) for returns, _ in ways]
    own.reserve(plans, [2 * weights.shape[1]] * len(plans), [0] * len(plans))
    found, first = [], {}
    for plan, (returns, comm_sms) in zip(plans, ways):
        sums = own.bring_home(plan, rows, operand, comm_sms=comm_sms)
        error = (torch.linalg.vector_norm(sums.float() - reference, dim=1) / size).max()
        # Rows come back as they are, so all ways add up the same numbers; so do all ways with sums.
        differs = (sums != first.setdefault(returns.sums, sums)).any()
        found.append(((returns, comm_sms), error, differs))
    own.check()
    return found


@pytest.mark.gpu(2)
def test_correctness_grid_of_the_paper(two_gpus, capsys):
    results = two_gpus(_paper_grid, limit_s=290.0)
    with capsys.disabled():
        for rank, (count, worst, case) in enumerate(results):
            print(f"\nrank {rank}: {count} checks, worst relative error of a token {worst:.2e} at {case}")
    assert all(count >= 1200 and 0 < worst <= LIMIT for count, worst, _ in results)


NUM_LAYERS, ITERATIONS, HIDDEN, INNER, EXPERTS = 8, 300, 64, 128, 8
LAYER_OPTIONS = [
    {"combine": "rows"},
    {"combine": "sums"},
    {"combine": "rows", "comm_sms": 4, "bands_per_segment": 1},
    {"combine": "sums", "comm_sms": 2},
    {"combine": "rows", "owner_alignment": "tile"},
    {"combine": "sums", "overlap_dispatch": False},
]
# Tokens of each rank in iterations 0, 1, 2, 3, ... in turn: three kinds and two halves of the buffer do not keep step.
LENGTHS = [(300, 257), (64, 700), (513, 1)]


def weights_of_layer(index):
    """The up and down projections of all experts, [E, I, H] and [E, H, I], of -1, 0 and 1; exact in bf16 throughout."""
    generator = torch.Generator().manual_seed(index)

    def some(rows, columns, terms):
        places = torch.randint(0, columns, (EXPERTS, rows, terms), generator=generator)
        signs = torch.randint(0, 2, (EXPERTS, rows, columns), generator=generator).double() * 2 - 1
        return torch.zeros(EXPERTS, rows, columns).double().scatter_(2, places, 1.0) * signs

    # An output is at most 4 * 8 / 2, a sum of two at most 32, in steps of a half.
    return some(INNER, HIDDEN, 4), some(HIDDEN, INNER, 8)


def inputs_of_layer(index, kind, rank):
    """The experts [T, 2] of each token, and a code of them [T, E] that the gate reads: two ones."""
    generator = torch.Generator().manual_seed(1000 + 100 * index + 10 * kind + rank)
    chosen = torch.rand(LENGTHS[kind][rank], EXPERTS, generator=generator).topk(2, 1).indices
    return chosen, torch.zeros(len(chosen), EXPERTS).scatter_(1, chosen, 1.0).double()


def expected_of_layer(x, chosen, up, down):
    """[T, H] in float64: half of each chosen expert's output, as both have the same logit."""
    sums = torch.zeros_like(x)
    for expert in range(EXPERTS):
        tokens = (chosen == expert).any(1)
        sums[tokens] += (x[tokens] @ up[expert].t()).relu() @ down[expert].t() / 2
    return sums


def next_input(y, code):
    """The sign of the last layer's output, so that an error anywhere shows in all that follows, beside the new code."""
    x = y.sign()
    x[:, :EXPERTS] = code
    return x


def layer_of(index, rank, device):
    layer = stock(mlp(HIDDEN, INNER, bias=False, act=torch.nn.ReLU), EXPERTS, 2, hidden=HIDDEN)
    up, down = weights_of_layer(index)
    local = EXPERTS // 2
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()[:, :EXPERTS] = 8.0 * torch.eye(EXPERTS)
        for i, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert[0].weight.copy_(up[rank * local + i])
            expert[2].weight.copy_(down[rank * local + i])
    options = LAYER_OPTIONS[index % len(LAYER_OPTIONS)]
    layer = ours(layer.to(device, torch.bfloat16), "overlap", **options)
    layer.set_deepspeed_parallelism()
    return layer


def test_the_layers_of_the_long_run_are_exact():
    """The numbers that the long run below expects are bf16 numbers, and every layer changes its input."""
    for kind in range(len(LENGTHS)):
        y = torch.randint(-1, 2, (LENGTHS[kind][0], HIDDEN), generator=torch.Generator().manual_seed(kind)).double()
        for index in range(NUM_LAYERS):
            chosen, code = inputs_of_layer(index, kind, 0)
            y = expected_of_layer(next_input(y, code), chosen, *weights_of_layer(index))
            assert torch.equal(y.bfloat16().double(), y) and y.abs().max() > 2 and (y != 0).double().mean() > 0.5


@torch.no_grad()
def _long_run():
    rank, device = torch.distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    layers = [layer_of(index, rank, device) for index in range(NUM_LAYERS)]
    starts, codes, expected = [], [], []
    for kind, lengths in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(50 + 10 * kind + rank)
        start = y = torch.randint(-1, 2, (lengths[rank], HIDDEN), generator=generator).double()
        starts.append(start.to(device, torch.bfloat16))
        codes.append([])
        expected.append([])
        for index in range(NUM_LAYERS):
            chosen, code = inputs_of_layer(index, kind, rank)
            y = expected_of_layer(next_input(y, code), chosen, *weights_of_layer(index))
            codes[-1].append(code.to(device, torch.bfloat16))
            expected[-1].append(y.to(device, torch.bfloat16))
    wrong = torch.zeros(ITERATIONS, NUM_LAYERS, dtype=torch.int64, device=device)
    delays, before = random.Random(rank), None
    for iteration in range(ITERATIONS):
        kind = iteration % len(LENGTHS)
        y = starts[kind]
        for index, layer in enumerate(layers):
            torch.cuda._sleep(int(delays.uniform(0.0, 5.0) * virtual_ranks.CYCLES_PER_MS))
            y, _, _ = layer(next_input(y, codes[kind][index]))
            wrong[iteration, index] = (y != expected[kind][index]).sum()
        if before is None:
            pool = overlap_group._GROUPS[layers[0].deepspeed_moe.ep_group].pool
            before = int(pool.returns.epoch) - NUM_LAYERS
    torch.cuda.synchronize()
    overlap_group.check_failure(pool.failure, pool.peers)
    assert int(pool.returns.epoch) - before == NUM_LAYERS * ITERATIONS, "a layer did not overlap"
    places = wrong.nonzero().tolist()
    assert not places, f"{len(places)} of {wrong.numel()} (iteration, layer), the first: {places[:5]}"


@pytest.mark.gpu(2)
def test_layers_for_a_long_time(two_gpus):
    two_gpus(_long_run, limit_s=240.0)
