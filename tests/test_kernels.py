"""Every Triton kernel against its plain PyTorch twin: on GPUs, or on CPU through Triton's interpreter."""

import dataclasses

import pytest
import torch
from models import E

from ds_tileoverlap import activation, combine, dispatch, expert_gemm, kernels, layout, placement, top_k
from ds_tileoverlap.exchange import Peers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PEERS = Peers(None, 0, (0,), 0.0, "test")


@pytest.fixture
def compare(monkeypatch):
    """Calls a function with the twins, then with the kernels on poisoned memory, and returns both results."""

    def run(function):
        results = []
        for with_kernels in (False, True):
            monkeypatch.setattr(kernels, "use_triton", lambda tensor, on=with_kernels: on)
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                results.append(function())
            finally:
                torch.use_deterministic_algorithms(False)
        return results

    return run


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_experts(num_tokens, k, num_experts, dropped=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, num_experts, generator=generator).topk(k, 1).indices.int()
    return experts.masked_fill(torch.rand(num_tokens, k, generator=generator) < dropped, -1).to(DEVICE)


def same(got, expected, rtol=0.0):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def test_worked_examples(compare):
    experts = torch.tensor([[0, 3, 1], [2, -1, 3]], dtype=torch.int32, device=DEVICE)
    received = torch.tensor([[0, -1, 1, 0, 0, 0], [0, -1, -1, 0, 0, 0]], dtype=torch.int32, device=DEVICE)

    def run():
        counted = placement.count_routes(experts, 4, 2)
        sent_tokens, choice_slots, token_slots, sent = placement.place_tokens(experts, random(2, 3), counted, 2)
        choice_rows, row_sources, _, row_offsets = placement.place_rows(received, 2, 3)
        rotated = placement.place_rows(received, 2, 3, first=1)
        rows = torch.tensor([[1.0], [2.0], [4.0]], device=DEVICE)
        sums = combine.sum_rows(rows, torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32, device=DEVICE))
        return [
            (counted.counts, [1, 1, 1, 2, 1, 2, 0]),
            (sent_tokens[:3], [0, 0, 1]),
            (choice_slots, [[0, 1, 0], [2, -1, 2]]),
            (token_slots, [[0, 1, -1], [2, -1, -1]]),
            (sent[:3, :3], [[0, -1, 1], [-1, 1, -1], [0, -1, 1]]),
            (choice_rows, [[0, -1, 2], [1, -1, -1]]),
            (row_sources, [0, 1, 0]),
            (rotated[0], [[1, -1, 2], [0, -1, -1]]),
            (rotated[1], [1, 0, 0]),
            (row_offsets, [0, 2, 3]),
            (sums, [[5.0], [2.0]]),
        ]

    for results in compare(run):
        for got, expected in results:
            assert got.tolist() == expected


@pytest.mark.parametrize(
    "num_tokens,k,num_experts,ranks",
    [(1, 1, 2, 2), (33, 2, 8, 4), (300, 8, 60, 3), (257, 3, 5, 1), (2100, 8, 128, 2), (70, 4, 1024, 512)],
)
def test_placement_kernels(compare, num_tokens, k, num_experts, ranks):
    experts, weights = random_experts(num_tokens, k, num_experts), random(num_tokens, k)

    def run():
        counted = placement.count_routes(experts, num_experts, ranks)
        sent_tokens, choice_slots, token_slots, sent = placement.place_tokens(experts, weights, counted, ranks)
        num_sent = int(counted.counts[num_experts:-1].sum())
        # One receiver takes every row: its local experts are those of all ranks laid over each other.
        num_rows = int((sent[:num_sent, :k] >= 0).sum())
        placed = placement.place_rows(sent[:num_sent], num_experts // ranks, num_rows, first=num_sent // 3)
        return [counted.counts, sent_tokens[:num_sent], choice_slots, token_slots, sent[:num_sent], *placed]

    twin, kernel = compare(run)
    same(kernel, twin)


def test_scalar_kernel(compare):
    index = torch.randint(-1, 20, (13, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values, by_column = random(20, seed=2), random(20, 3, seed=3)
    strided = random(20, 8, seed=4)[:, 2:5]
    twin, kernel = compare(lambda: [combine.gather_scalars(v, index) for v in (values, by_column, strided)])
    same(kernel, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 72, 1025, 4100])
def test_sum_kernel(compare, width, dtype):
    rows = random(50, 2 * width, dtype=dtype)[:, :width]
    choices = torch.randint(-1, 50, (37, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    twin, kernel = compare(lambda: [combine.sum_rows(rows, choices)])
    same(kernel, twin, rtol=torch.finfo(dtype).eps)


def test_scalars_in_the_same_pass(compare):
    rows, values = random(50, 24, seed=1), random(50, seed=2)
    index = torch.randint(-1, 50, (37, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    other = torch.randint(-1, 40, (37, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def run():
        packed = torch.zeros(37, 32, device=DEVICE)
        combine.sum_rows(rows, index, packed[:, :24], (values, index, packed[:, 24:27]))
        picked = torch.empty(37, 3, device=DEVICE)
        by_column = random(40, 3, seed=5)
        return [packed, combine.sum_rows(rows, index, None, (by_column, other, picked)), picked]

    twin, kernel = compare(run)
    same(kernel, twin, rtol=1e-6)


def test_split_gradient_of_the_logits_adds_up(monkeypatch):
    monkeypatch.setattr(kernels, "use_triton", lambda tensor: True)
    logits, grad, l_aux = random(33, 12, seed=1), random(33, 3, seed=2), torch.tensor(2.0, device=DEVICE)
    experts, _, balanced, _, _ = top_k._route_triton(logits, None, 0, None, 3)
    whole = top_k._route_backward_triton(logits, experts, balanced, grad, l_aux)
    parts = top_k._route_backward_triton(logits, experts, balanced, grad, l_aux, split=True)
    assert parts.dtype == torch.bfloat16
    # 2 ** -16 where the parts are rounded; Triton's interpreter cuts them off.
    assert (parts.float().view(33, 2, 12).sum(1) - whole).abs().max() <= 2**-14 * whole.abs().max()


def test_a_row_of_nan_stays_in_its_sum(compare):
    rows = random(4, 8)
    rows[1] = float("nan")
    index = torch.tensor([[0, 2], [1, -1], [-1, 3]], dtype=torch.int32, device=DEVICE)
    for (sums,) in compare(lambda: [combine.sum_rows(rows, index)]):
        assert sums.isnan().any(1).tolist() == [False, True, False]


LIMIT = 0.75
ACTIVATIONS = [activation.Activation(name) for name in activation.ACTIVATIONS]
ACTIVATIONS += [activation.Activation("silu", limit=LIMIT), activation.Activation("silu", 1.702, LIMIT, shift=1.0)]


@pytest.mark.parametrize("dtype,rtol", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: f"{act.name}-{act.limit}")
@pytest.mark.parametrize("width", [40, 1030])
def test_activation_kernels(compare, width, act, gated, dtype, rtol):
    joint = random(9, 2 * width, seed=1, dtype=dtype)
    joint[0, ::3], joint[0, 1::3] = LIMIT, -LIMIT
    gate, up = joint.chunk(2, 1) if gated else (None, joint[:, :width])
    weights, grad = random(9, seed=2).abs(), random(9, width, seed=3, dtype=dtype)

    def run():
        grad_gate, grad_up = torch.empty_like(joint).chunk(2, 1)
        hidden = torch.empty(9, width, dtype=dtype, device=DEVICE)
        grad_weights = activation.hidden_backward(
            gate, up, weights, act, grad, grad_gate if gated else None, grad_up, hidden
        )
        return [
            activation.weighted_hidden(gate, up, weights, act),
            grad_up,
            hidden,
            grad_weights,
            *([grad_gate] * gated),
        ]

    twin, kernel = compare(run)
    for a, b in zip(kernel, twin, strict=True):
        assert (a - b).abs().max() <= rtol * b.abs().max() * (4 if b.dim() == 1 else 1)


def plan_of(counts):
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)
    host = torch.tensor([[*counts, 0, 0]], dtype=torch.int32)
    return layout.Plan(PEERS, host, *[None] * 7, row_offsets=offsets)


@pytest.mark.parametrize("width", [1, 70, 2050])
def test_bias_kernels(compare, width):
    counts = [3, 0, 130, 1]
    plan, num_rows = plan_of(counts), sum(counts)
    biases = random(4, width, seed=1)
    weights, grads, rows = random(num_rows, seed=2), random(num_rows, width, seed=3), random(num_rows, width, seed=4)

    def run():
        plain, weighted = rows.clone(), rows.clone()
        expert_gemm.add_expert_bias_(plain, biases, plan)
        expert_gemm.add_expert_bias_(weighted, biases, plan, weights)
        sums = [expert_gemm.expert_sums(grads, plan), expert_gemm.expert_sums(grads, plan, weights)]
        return [plain, weighted, expert_gemm.expert_bias_dot(grads, biases, plan), *sums]

    twin, kernel = compare(run)
    same(kernel, twin, rtol=3e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("noisy_from", [None, 0, 1])
@pytest.mark.parametrize(
    "num_tokens,k,num_experts,normalize",
    [
        (33, 1, 8, True),
        (70, 2, 6, True),
        (70, 2, 6, False),
        (129, 3, 60, True),
        (40, 8, 128, True),
        (40, 8, 128, False),
    ],
)
def test_routing_kernels(compare, num_tokens, k, num_experts, normalize, noisy_from, masked):
    logits = random(num_tokens, num_experts, seed=1)
    # Upstream's noise comes with at most two choices; the twin sorts more of them without it.
    noise = random(num_tokens, num_experts, seed=2) if noisy_from is not None and k <= 2 else None
    used = (random(num_tokens, seed=3) > 0).long() if masked else None
    grad = random(num_tokens, k, seed=4)

    def run():
        x = logits.clone().requires_grad_()
        if kernels.use_triton(x):
            routing = top_k.TopKRouting.apply
        else:
            routing = top_k.top_k_routing
        experts, weights, l_aux, counts = routing(x, noise, noisy_from or 0, used, k, normalize)
        ((weights * grad).sum() + 3 * l_aux).backward()
        return [experts, counts, weights, l_aux, x.grad]

    twin, kernel = compare(run)
    same(kernel[:2], twin[:2])
    same(kernel[2:], twin[2:], rtol=1e-5)


def test_routing_kernel_gives_distinct_experts_on_ties_and_nan(monkeypatch):
    monkeypatch.setattr(kernels, "use_triton", lambda tensor: True)
    logits = torch.zeros(3, E, device=DEVICE)
    logits[1] = float("nan")
    logits[2, 3] = 1.0
    experts, weights, _, counts = top_k.TopKRouting.apply(logits, None, 0, None, 3)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2], [3, 0, 1]]
    assert counts.sum() == 9 and weights[1].isnan().all() and not weights[[0, 2]].isnan().any()


@pytest.mark.parametrize("own,choices", [([5, 0, 2], [[1, -1], [4, 0], [-1, 7]]), ([], [])], ids=["some", "none"])
@pytest.mark.parametrize("width", [8, 300, 2056])
def test_place_own_rows(compare, width, own, choices):
    """Received rows 0-3 are from rank 0, then come this rank's own, then two of rank 2; rows 2, 3, 5 and 6 of peers."""
    x, before = random(6, width), random(8, width, seed=1)
    sent = torch.tensor([4, 3, *own, 1], dtype=torch.int32, device=DEVICE)
    places = [[2, -1], [-1, 5], [3, -1], [-1, 6], *choices, [-1, 2], [6, -1]]
    counts = torch.zeros(3, 3 + 3 + 1, dtype=torch.int32)
    counts[1, 3:6], counts[:, 4] = torch.tensor([2, len(own), 1]), torch.tensor([4, len(own), 2])
    plan = layout.Plan(Peers(None, 1, (0, 1, 2), 0.0, "test"), counts, *[None] * 8)
    plan = dataclasses.replace(
        plan, sent_tokens=sent, choice_rows=torch.tensor(places, dtype=torch.int32, device=DEVICE)
    )

    def run():
        rows = before.clone()
        dispatch.place_own_rows(x, plan, rows)
        return [rows]

    expected = before.clone()
    for token, named in zip(own, choices):
        expected[[row for row in named if row >= 0]] = x[token]
    for (rows,) in compare(run):
        assert torch.equal(rows, expected)


def test_a_kernel_is_launched_as_compiled_until_an_argument_looks_otherwise():
    launched = []

    class Compiled:
        function = "a handle"

        def __getitem__(self, grid):
            return lambda *values, stream: launched.append((grid, values))

    class Function:
        @staticmethod
        def fn(x, n, y, WIDTH):
            pass

        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append("function") or Compiled()

    kernel, x, y = kernels.Kernel(Function()), torch.zeros(32), torch.zeros(1)
    kernel[(3,)](x, 5, y, WIDTH=4)
    kernel[(2,)](x, 7, y, WIDTH=4)
    assert launched == ["function", ((2, 1, 1), (x.data_ptr(), 7, y.data_ptr(), 4))]
    for others in [(x[1:], 5, y), (x.half(), 5, y), (x, 1, y), (x, 16, y), (x, 2**31, y), (x, 5.0, y), (y, 5, x.int())]:
        launched.clear()
        kernel[(2,)](*others, WIDTH=4)
        kernel[(2, 3)](*others, WIDTH=4)
        assert launched[0] == "function" and launched[1][0] == (2, 3, 1), others
    launched.clear()
    kernel[(2,)](x, 5, y, WIDTH=8)
    assert launched == ["function"]
