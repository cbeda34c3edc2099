"""The expert GEMM on its own, against float64: awkward shapes, dirty memory around every operand, any number of SMs."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from virtual_ranks import DEVICE, GUARD_WORDS, UNTOUCHED, tiles_of_item, words_of_items

from ds_tileoverlap import schedule
from ds_tileoverlap.activation import Activation

pytestmark = pytest.mark.gpu(1)

# Rows of an expert: around the ends of a warpgroup's, a tile's and an item's share.
ROWS = (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
RANKS, RANK = 3, 1
# Signals are stamped with the epoch, and wrap with it.
EPOCH, BEFORE = -1, -2
# Half a unit in the last place, and what tensor cores may lose of the sum of absolute products.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ACCUMULATION, SMALLEST = 2.0**-14, 2.0**-24
# (K, N): no more than one vector of 8, less and more than a stage of 64 and a tile of 256, several of both.
SHAPES = [(8, 8), (64, 256), (72, 264), (200, 520), (8, 1288), (1032, 8), (1000, 248), (136, 2056), (512, 768)]
SHAPES += [tuple(8 * n for n in pair) for pair in np.random.default_rng(0).integers(1, 130, (6, 2)).tolist()]


def amid_nan(rows, columns, dtype, fill=True):
    """A matrix with NaN before and after it, 16 bytes past a round address. Returns it and all of its memory."""
    first = 3 * columns + 8
    bits = torch.full((first + (rows + 3) * columns,), UNTOUCHED, dtype=torch.int16, device=DEVICE)
    memory = bits.view(dtype)
    matrix = memory[first : first + rows * columns].view(rows, columns)
    return (matrix.normal_() if fill else matrix), memory


def is_untouched_around(matrix, memory):
    bits = memory.view(torch.int16)
    first = matrix.storage_offset()
    return (bits[:first] == UNTOUCHED).all() and (bits[first + matrix.numel() :] == UNTOUCHED).all()


@dataclass
class Problem:
    """Operands of one grouped GEMM; expert weights lie apart from each other, in no order.

    Attributes:
        routes: [RANKS, E_local], rows of each owner.
        a: [R, K].
        weights: of each expert [N, K], or [K, N] where transposed.
        options: further arguments of the operator.
    """

    dtype: torch.dtype
    k: int
    n: int
    transposed: bool
    aligns_owners: bool
    panel_tiles: int
    routes: np.ndarray
    a: torch.Tensor
    weights: list[torch.Tensor]
    options: dict = field(default_factory=dict)
    kept: list = field(default_factory=list)

    @property
    def counts(self):
        return self.routes.sum(0).tolist()

    @property
    def column_tiles(self):
        return -(-self.n // schedule.TILE_N)

    def maps(self, op, weights):
        host = torch.empty(len(weights) * op.MAP_BYTES, dtype=torch.uint8)
        rows, columns = weights[0].shape
        op.encode_weights(
            maps=host.data_ptr(), weights=[w.data_ptr() for w in weights], rows=rows, columns=columns,
            is_half=self.dtype == torch.float16, b_is_transposed=self.transposed,
        )  # fmt: skip
        self.kept.append(host.to(DEVICE))
        return self.kept[-1]


def weights_in_any_order(rng, experts, n, k, dtype, transposed):
    """Weights of about unit columns, allocated one by one in random order between blocks of other sizes."""
    found, between = {}, []
    for expert in rng.permutation(experts).tolist():
        between.append(torch.empty(int(rng.integers(1, 5000)), dtype=torch.uint8, device=DEVICE))
        weight, _ = amid_nan(*((k, n) if transposed else (n, k)), dtype)
        found[expert] = weight.mul_(k**-0.5)
    return [found[expert] for expert in range(experts)]


def problem(seed, k, n, dtype, transposed, experts, aligns_owners=False, panel_tiles=0):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    if aligns_owners:
        routes = np.resize(rng.permutation(np.tile(ROWS, RANKS)), (RANKS, experts))
    else:
        totals = np.resize(rng.permutation(ROWS), experts)
        routes = rng.multinomial(totals, np.full(RANKS, 1 / RANKS)).T
    a, _ = amid_nan(int(routes.sum()), k, dtype)
    weights = weights_in_any_order(rng, experts, n, k, dtype, transposed)
    return Problem(dtype, k, n, transposed, aligns_owners, panel_tiles, routes, a, weights)


def run(op, p, num_sms, counts_tiles=True, local_first=False, **options):
    """Runs the GEMM on dirty memory; everything but the values is checked here. Returns C [R, N]."""
    items = schedule.plain_items(p.routes, RANK, p.n, p.aligns_owners, p.panel_tiles, local_first)
    runs = p.routes if p.aligns_owners else p.routes.sum(0)
    num_signals = int((-(-runs // schedule.BAND)).sum()) * p.column_tiles * 2
    panel_tiles = p.panel_tiles or p.column_tiles
    num_panels = -(-p.column_tiles // panel_tiles)

    to_do = [0] * num_panels
    for item in items:
        for _, column in tiles_of_item(item, p.column_tiles):
            to_do[column // panel_tiles] += item[5]

    def words(values):
        return torch.tensor([*values, *[BEFORE] * GUARD_WORDS], dtype=torch.int32, device=DEVICE)

    c, memory = amid_nan(len(p.a), p.n, p.dtype, fill=False)
    signals, panel_left, claimed, epoch = (words(v) for v in ([BEFORE] * num_signals, to_do, [0], [EPOCH]))
    table, num_items = words_of_items(items).to(DEVICE), words([len(items)])
    options = {"a": p.a.data_ptr(), "b_maps": p.maps(op, p.weights).data_ptr(), **p.options, **options}
    if counts_tiles:
        options.update(signals=signals.data_ptr(), epoch=epoch.data_ptr())
        options.update(panel_left=panel_left.data_ptr(), panel_tiles=panel_tiles)
    op.expert_gemm(
        c=c.data_ptr(), items=table.data_ptr(), num_items=num_items.data_ptr(), claimed=claimed.data_ptr(),
        num_rows=len(p.a), n=p.n, k=p.k, is_half=p.dtype == torch.float16, b_is_transposed=p.transposed,
        num_sms=num_sms, stream=torch.cuda.current_stream().cuda_stream, **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert claimed[0] == 0, "claimed items"
    assert is_untouched_around(c, memory), "written outside of C"
    assert (signals[:num_signals] == (EPOCH if counts_tiles else BEFORE)).all(), "ready signals"
    assert (signals[num_signals:] == BEFORE).all(), "written behind the signals"
    left = [0] * num_panels if counts_tiles else to_do
    assert panel_left.tolist() == left + [BEFORE] * GUARD_WORDS, "tiles that are left"
    return c


def exact(a, weight, transposed):
    """The product in float64, and the sum of the absolute values of its terms."""
    a, b = a.double(), weight.double() if transposed else weight.double().t()
    return a @ b, a.abs() @ b.abs()


def assert_close(p, c, experts=None, second=None):
    """Every element is the float64 product, rounded."""
    starts = np.cumsum([0, *p.counts])
    worst = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for expert in range(len(p.weights)) if experts is None else experts:
        mine = slice(int(starts[expert]), int(starts[expert + 1]))
        product, size = exact(p.a[mine], p.weights[expert], p.transposed)
        if second is not None:
            other = exact(second[0][mine], second[1][expert], p.transposed)
            product, size = product + other[0], size + other[1]
        allowed = ROUNDING[p.dtype] * product.abs() + ACCUMULATION * size + SMALLEST
        if mine.start < mine.stop:
            # A NaN stays one in the largest, and is not below any limit.
            worst = torch.maximum(worst, ((c[mine].double() - product).abs() / allowed).max())
    assert worst <= 1.0, f"{float(worst):.2f} times the error that rounding explains"


def all_sms():
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


@pytest.mark.parametrize("transposed", [False, True], ids=["n,k", "k,n"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64_with_any_number_of_sms(op, shape, dtype, transposed):
    at = SHAPES.index(shape)
    experts, panel_tiles = (12, 1, 160, 40)[at % 4], (0, 2, 4)[at % 3]
    p = problem(at, *shape, dtype, transposed, experts, aligns_owners=at % 2 == 1, panel_tiles=panel_tiles)
    first = run(op, p, all_sms())
    assert_close(p, first)
    for num_sms in (2, 10, 11, all_sms()):
        assert torch.equal(run(op, p, num_sms), first), f"another result with {num_sms} SMs"
    assert torch.equal(run(op, p, all_sms(), counts_tiles=False), first), "another result without signals"


@pytest.mark.parametrize("transposed", [False, True], ids=["n,k", "k,n"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows_alone_and_between_others(op, rows, transposed):
    p = problem(rows, 72, 264, torch.bfloat16, transposed, 1)
    p.routes = np.array([[0, 0, 0], [rows, 0, rows], [0, rows, 0]])
    p.a, _ = amid_nan(3 * rows, 72, torch.bfloat16)
    p.weights = weights_in_any_order(np.random.default_rng(1), 3, 264, 72, torch.bfloat16, transposed)
    assert_close(p, run(op, p, 10))


@pytest.mark.parametrize("transposed", [False, True], ids=["n,k", "k,n"])
def test_nan_stays_in_its_row_and_in_its_expert(op, transposed):
    p = problem(5, 200, 520, torch.bfloat16, transposed, 12)
    clean = run(op, p, all_sms())
    starts = np.cumsum([0, *p.counts]).tolist()
    # The first and the last row of every expert that has several: tiles at its ends hold rows of its neighbours.
    rows = [row for first, end in zip(starts, starts[1:]) if end - first > 1 for row in (first, end - 1)]
    kept = p.a.clone()
    p.a[rows, 199] = float("nan")
    dirty = run(op, p, all_sms())
    assert dirty[rows].isnan().all()
    dirty[rows] = clean[rows]
    assert torch.equal(dirty, clean), "NaN of one row reached another"

    p.a.copy_(kept)
    expert = p.counts.index(129)
    p.weights[expert].fill_(float("nan"))
    dirty = run(op, p, all_sms())
    mine = slice(starts[expert], starts[expert + 1])
    assert dirty[mine].isnan().all()
    dirty[mine] = clean[mine]
    assert torch.equal(dirty, clean), "NaN of one expert's weight reached another expert"


def make_arriving(p, seed):
    """Gives ``p`` rows of which each received one may be wanted by several experts. Returns these and who is where."""
    rng = np.random.default_rng(seed)
    sent = (37, 80, 45)
    first = np.cumsum([0, *sent])
    # Within an expert the rows of other ranks come first.
    sources = [
        rng.integers(first[owner], first[owner + 1], p.routes[owner, expert])
        for expert in range(p.routes.shape[1])
        for owner in ((RANK + 1) % RANKS, (RANK + 2) % RANKS, RANK)
    ]
    sources = torch.from_numpy(np.concatenate(sources).astype(np.int32)).to(DEVICE)
    received = torch.randn(sum(sent), p.k, device=DEVICE).to(p.dtype)
    p.a = received[sources.long()]
    return received, sources, int(first[RANK]), int(first[RANK + 1])


def run_arriving(op, p, num_sms, received, sources, own_first, own_end, under_gemm=True):
    """Runs the GEMM on rows of which its couriers, or couriers before it, put those of peers in place. Returns C."""
    is_own = (sources >= own_first) & (sources < own_end)
    rows, memory = amid_nan(len(sources), p.k, p.dtype, fill=False)
    rows[is_own] = p.a[is_own]
    # Two halves of a receive buffer; the epoch is odd, so that the second holds the rows.
    remote = torch.cat([received[:own_first], received[own_end:]])
    halves = torch.full((2, len(remote) + 3, p.k), UNTOUCHED, dtype=torch.int16, device=DEVICE).view(p.dtype)
    halves[1, : len(remote)] = remote
    routes = np.zeros((RANKS, *p.routes.shape), dtype=np.int64)
    routes[:, RANK] = p.routes
    segments = schedule.plain_segments(routes, RANK, 2 * p.k, False, 1)
    num_bands = int((-(-p.routes.sum(0) // schedule.BAND)).sum())

    def words(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    missing = words(schedule.plain_band_parts(segments, num_bands) + [BEFORE] * GUARD_WORDS)
    table, num_segments = words([(*segment, 0) for segment in segments]), words([len(segments) - 1])
    claimed, finished, failure = words([0]), words([0]), words([0] * 5)
    epoch, arrived, consumed = words([EPOCH]), words([5, 0, -7]), words([BEFORE] * RANKS)
    peer_consumed = torch.tensor([consumed[i:].data_ptr() for i in range(RANKS)], device=DEVICE)
    arrivals = op.Arrivals(
        rows=rows.data_ptr(), row_bytes=2 * p.k, sources=sources.data_ptr(), own_first=own_first, own_end=own_end,
        segments=table.data_ptr(), num_segments=num_segments.data_ptr(), missing=missing.data_ptr(),
        received=halves.data_ptr(), generation_bytes=halves[0].numel() * 2, epoch=epoch.data_ptr(),
        arrived=arrived.data_ptr(), targets=arrived.data_ptr(), peer_consumed=peer_consumed.data_ptr(),
        claimed=claimed.data_ptr(), finished=finished.data_ptr(), num_peers=RANKS, failure=failure.data_ptr(),
        limit_ns=10**9,
    )  # fmt: skip
    if not under_gemm:
        stream = torch.cuda.current_stream().cuda_stream
        op.run_couriers(arrivals=arrivals, is_half=p.dtype == torch.float16, num_sms=num_sms, stream=stream)
    c = run(op, p, num_sms, local_first=True, a=rows.data_ptr(), **({"arrivals": arrivals} if under_gemm else {}))
    assert torch.equal(rows.view(torch.int16), p.a.view(torch.int16)), "rows in place"
    assert is_untouched_around(rows, memory), "written outside of the rows"
    assert missing.tolist() == [0] * num_bands + [BEFORE] * GUARD_WORDS, "parts that are missing"
    assert consumed.tolist() == [EPOCH] * RANKS, "what peers are told"
    assert not claimed and not finished and not failure.any()
    return c


@pytest.mark.parametrize("transposed", [False, True], ids=["n,k", "k,n"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_arrive_give_the_same_bits(op, shape, dtype, transposed):
    at = SHAPES.index(shape)
    p = problem(at, *shape, dtype, transposed, (12, 1, 40, 3)[at % 4])
    arriving = make_arriving(p, at)
    first = run_arriving(op, p, all_sms(), *arriving)
    assert_close(p, first)
    assert torch.equal(run_arriving(op, p, 2, *arriving), first)
    assert torch.equal(run_arriving(op, p, all_sms(), *arriving, under_gemm=False), first), "placed before the GEMM"
    assert torch.equal(run(op, p, all_sms()), first), "another result where all rows are there from the start"


@pytest.mark.parametrize("transposed", [False, True], ids=["n,k", "k,n"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_second_pair_of_operands_is_added(op, shape, transposed):
    at = SHAPES.index(shape)
    dtype, k2 = (torch.bfloat16, torch.float16)[at % 2], SHAPES[(at + 4) % len(SHAPES)][0]
    p = problem(at, *shape, dtype, transposed, 12)
    a2, _ = amid_nan(len(p.a), k2, dtype)
    weights2 = weights_in_any_order(np.random.default_rng(at), 12, p.n, k2, dtype, transposed)
    p.options.update(a2=a2.data_ptr(), b2_maps=p.maps(op, weights2).data_ptr(), k2=k2)
    first = run(op, p, all_sms())
    assert_close(p, first, second=(a2, weights2))
    assert torch.equal(run(op, p, 10), first)


def run_gated(op, p, up_weights, row_weights, act, num_sms, joint):
    """Gate, up [R, N] and the hidden rows of both, in one kernel on dirty memory."""
    items = schedule.plain_items(p.routes, RANK, schedule.gated_width(p.n), p.aligns_owners)
    table = words_of_items(items).to(DEVICE)
    num_items, claimed = torch.tensor([[len(items)], [0]], dtype=torch.int32, device=DEVICE)
    both = [amid_nan(len(p.a), 2 * p.n if joint else p.n, p.dtype, fill=False) for _ in range(1 if joint else 2)]
    gate, up = both[0][0].chunk(2, 1) if joint else (matrix for matrix, _ in both)
    hidden, memory = amid_nan(len(p.a), p.n, p.dtype, fill=False)
    op.expert_gemm(
        a=p.a.data_ptr(), b_maps=p.maps(op, p.weights).data_ptr(), up_maps=p.maps(op, up_weights).data_ptr(),
        c=gate.data_ptr(), up=up.data_ptr(), stride=up.stride(0), hidden=hidden.data_ptr(),
        row_weights=row_weights.data_ptr(), alpha=act.alpha, limit=act.limit, shift=act.shift,
        items=table.data_ptr(), num_items=num_items.data_ptr(),
        claimed=claimed.data_ptr(), num_rows=len(p.a), n=p.n, k=p.k, is_half=p.dtype == torch.float16,
        b_is_transposed=False, num_sms=num_sms, stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not claimed
    assert all(is_untouched_around(*found) for found in (*both, (hidden, memory))), "written outside of the results"
    return gate, up, hidden


@pytest.mark.parametrize("act", [Activation("silu"), Activation("silu", 1.7, 0.5, 1.0)], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_and_up_at_once_equal_one_after_the_other(op, shape, joint, act):
    at = SHAPES.index(shape)
    dtype = (torch.bfloat16, torch.float16)[at % 2]
    p = problem(at, *shape, dtype, False, (12, 1, 160, 40)[at % 4], aligns_owners=at % 3 == 1)
    up_weights = weights_in_any_order(np.random.default_rng(at), len(p.weights), p.n, p.k, dtype, False)
    row_weights = torch.rand(len(p.a), device=DEVICE)
    gate, up, hidden = run_gated(op, p, up_weights, row_weights, act, all_sms(), joint)
    assert torch.equal(gate, run(op, p, all_sms()))
    again = run_gated(op, p, up_weights, row_weights, act, 10, joint)
    assert all(torch.equal(a, b) for a, b in zip((gate, up, hidden), again))
    p.weights = up_weights
    assert torch.equal(up, run(op, p, all_sms()))
    expected = act(gate.double(), up.double()) * row_weights.double().unsqueeze(1)
    allowed = (ROUNDING[dtype] + 1e-5) * expected.abs() + SMALLEST
    assert ((hidden.double() - expected).abs() <= allowed).all()


def test_operands_of_more_than_two_to_the_31_elements(op):
    """A and C have more; their last rows lie beyond what 32 bits can count, in elements and in bytes."""
    k = n = 4096
    experts, rows = 16, 33_800
    if torch.cuda.mem_get_info(DEVICE)[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    p = problem(0, k, n, torch.bfloat16, False, experts)
    p.routes = np.zeros((RANKS, experts), dtype=np.int64)
    p.routes[RANK], p.routes[0] = rows - 1000, 1000
    p.a, _ = amid_nan(experts * rows, k, torch.bfloat16)
    assert min(p.a.numel(), len(p.a) * n) > 2**31
    c = run(op, p, all_sms())
    assert all(part.isfinite().all() for part in c.split(2**16)), "rows that were not computed"
    for expert in (0, experts // 2, experts - 1):
        product = exact(p.a[expert * rows :][:rows], p.weights[expert], False)
        allowed = ROUNDING[p.dtype] * product[0].abs() + ACCUMULATION * product[1] + SMALLEST
        worst = ((c[expert * rows :][:rows].double() - product[0]).abs() / allowed).max()
        assert worst <= 1.0, (expert, float(worst))


def run_weight_grads(op, grads, rows, counts, num_sms):
    """Runs the kernel on dirty memory. Returns [E_local, N, K]."""
    n, k = grads.shape[1], rows.shape[1]
    c, memory = amid_nan(len(counts) * n, k, rows.dtype, fill=False)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)
    claimed = torch.tensor([0, BEFORE], dtype=torch.int32, device=DEVICE)
    maps = torch.full((2 * len(counts) + 1, op.MAP_BYTES), 255, dtype=torch.uint8, device=DEVICE)
    exchange = op.Exchange(
        counts=0, counts_stride=0, num_ranks=1, rank=0, num_experts=len(counts), num_choices=1, num_tokens=0,
        claimed_items=claimed.data_ptr(), num_sms=num_sms, failure=0, limit_ns=0,
    )  # fmt: skip
    op.weight_grads(
        exchange, torch.cuda.current_stream().cuda_stream, grads=grads.data_ptr(), rows=rows.data_ptr(), c=c.data_ptr(),
        row_offsets=offsets.data_ptr(), maps=maps.data_ptr(), num_experts=len(counts), num_rows=len(rows), n=n, k=k,
        is_half=rows.dtype == torch.float16,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert claimed.tolist() == [0, BEFORE], "claimed items"
    assert is_untouched_around(c, memory), "written outside of the gradients"
    assert (maps[-1] == 255).all(), "written behind the maps"
    return c.view(len(counts), n, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weight_gradients_equal_float64_with_any_number_of_sms(op, shape, dtype):
    at, (k, n) = SHAPES.index(shape), shape
    torch.manual_seed(at)
    counts = np.resize(np.random.default_rng(at).permutation([*ROWS, 0, 1000]), (12, 1, 160, 40)[at % 4]).tolist()
    (grads, _), (rows, _) = (amid_nan(sum(counts), width, dtype) for width in (n, k))
    first = run_weight_grads(op, grads, rows, counts, all_sms())
    starts = np.cumsum([0, *counts]).tolist()
    for expert, mine in enumerate(map(slice, starts, starts[1:])):
        product = grads[mine].double().t() @ rows[mine].double()
        size = grads[mine].double().abs().t() @ rows[mine].double().abs()
        allowed = ROUNDING[dtype] * product.abs() + ACCUMULATION * size + SMALLEST
        assert ((first[expert].double() - product).abs() <= allowed).all(), (expert, counts[expert])
    for num_sms in (2, 10, 11, all_sms()):
        again = run_weight_grads(op, grads, rows, counts, num_sms)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16)), f"another result with {num_sms} SMs"


@pytest.mark.parametrize("rows", ROWS)
def test_weight_gradients_of_one_expert_are_not_reached_by_nan_of_another(op, rows):
    counts, spoiled = [rows, 5, rows, 0, 130, rows], (1, 4)
    (grads, _), (inputs, _) = (amid_nan(sum(counts), width, torch.bfloat16) for width in (264, 520))
    clean = run_weight_grads(op, grads, inputs, counts, all_sms())
    starts = np.cumsum([0, *counts]).tolist()
    for expert in spoiled:
        grads[starts[expert] : starts[expert + 1]] = float("nan")
        inputs[starts[expert] : starts[expert + 1]] = float("inf")
    dirty = run_weight_grads(op, grads, inputs, counts, all_sms())
    for expert in range(len(counts)):
        assert dirty[expert].isnan().all() if expert in spoiled else torch.equal(dirty[expert], clean[expert])


def test_weight_gradients_without_rows_are_zero(op):
    grads, rows = (torch.empty(0, width, dtype=torch.bfloat16, device=DEVICE) for width in (24, 40))
    assert not run_weight_grads(op, grads, rows, [0, 0, 0], all_sms()).any()
