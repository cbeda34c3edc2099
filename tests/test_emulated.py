"""The overlap backend on CPUs: its own host code, its own kernels emulated, ranks as threads of this process."""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS, GroupedExperts
from emulated_op import build, hold_up
from emulated_ranks import GROUPS, GUARDS, E, H, ThreadPools, layer_of
from models import ERRORS, Gated, fill, mlp, ours, relative_errors, stock, tokens
from schedule_twins import assert_equals_twins

from ds_tileoverlap import buffer, layout, overlap, overlap_group, route, schedule, sequential, symmetric_layout
from ds_tileoverlap.config import TileOverlapConfig
from ds_tileoverlap.exchange import PeerError
from ds_tileoverlap.stacked_experts import StackedExperts

pytestmark = pytest.mark.usefixtures("no_streams_and_dirty_memory")


@pytest.fixture(scope="module")
def op(emulated):
    return emulated


def random_routes(seed, num_tokens, k, num_experts):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, num_experts, generator=generator).topk(k, 1).indices.int()
    experts[torch.rand(experts.shape, generator=generator) < 0.2] = -1
    return route.Routes(experts, torch.rand(experts.shape, generator=generator), None, None)


def _layout(rank, group, peers, lengths, k, num_experts, combine):
    config, plans = TileOverlapConfig(enabled=True, combine=combine), []
    for step, length in enumerate(lengths):
        routes = random_routes(100 * step + rank, length[rank], k, num_experts)
        counting = symmetric_layout.Counting(routes, num_experts, peers, group, config, 128, True)
        plans.append((routes, counting.finish(arriving=[136, 520], returning=[1288]), counting.schedules.values()))
    return plans


@pytest.mark.parametrize("combine", ["rows", "sums", "auto"])
@pytest.mark.parametrize("size,k,num_experts", [(2, 1, 2), (2, 3, 60), (4, 8, 64), (8, 2, 16)])
def test_layout(op, size, k, num_experts, combine):
    lengths = [
        (33,) * size,
        tuple(300 - 40 * r for r in range(size)),
        (0,) * size,
        tuple(257 * (r % 2) for r in range(size)),
    ]
    results = ThreadPools(size, op).run(_layout, lengths, k, num_experts, combine)
    for step in range(len(lengths)):
        routes, plans, schedules = zip(*(result[step] for result in results))
        sent = [placed(r.experts, r.weights, num_experts, size) for r in routes]
        for rank, plan in enumerate(plans):
            counted, (sent_tokens, choice_slots, token_slots, _) = sent[rank]
            assert torch.equal(plan.counts[rank], counted) and plan.tally.all_can_overlap
            assert plan.tally == replace(plan, slots=None).tally, "the operator's tally is its Python twin's"
            config = TileOverlapConfig(enabled=True, combine=combine)
            assert plan.returns == symmetric_layout.choose_returns(config, plan.tally, 128), "and so is its choice"
            assert torch.equal(plan.sent_tokens, sent_tokens[: plan.sent_tokens.numel()])
            assert torch.equal(plan.choice_slots, choice_slots) and torch.equal(plan.token_slots, token_slots)
            received = torch.cat(
                [s[1][3][sum(p.send_splits[:rank]) : sum(p.send_splits[: rank + 1])] for s, p in zip(sent, plans)]
            )
            rows = layout.place_rows(
                received, num_experts // size, sum(plan.expert_counts), sum(plan.recv_splits[: rank + 1])
            )
            got = (plan.choice_rows, plan.row_sources, plan.row_weights, plan.row_offsets)
            assert all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))
            to_slots = (plan.token_slots, plan.sends) if plan.returns.sums else None
            assert torch.equal(plan.slots, schedule.plain_slots(routes[rank].experts, plan.routes, rank, to_slots))
            for tiles in schedules[rank]:
                assert_equals_twins(tiles, plan.routes, plan.sends, rank)


def _told(rank, group, peers):
    routes, config = random_routes(rank, 33, 2, 8), TileOverlapConfig(enabled=True)
    counting = symmetric_layout.Counting(
        routes, 8, peers, group, config, 128, can_overlap=rank < 2, runs_modules=rank == 3
    )
    return counting.finish()


def test_what_experts_cannot_is_told_with_the_counts(op):
    for plan in ThreadPools(4, op).run(_told):
        assert plan.counts[:, -1].tolist() == [0, 0, layout.CANNOT_OVERLAP, layout.CANNOT_OVERLAP | layout.RUNS_MODULES]
        assert plan.runs_modules and not plan.overlaps and plan.first_that_cannot_overlap == 2


def placed(experts, weights, num_experts, size):
    counted = layout.count_routes(experts, num_experts, size)
    return counted.counts, layout.place_tokens(experts, weights, counted, size)


def _train(rank, group, peers, layers, lengths, dtype):
    """Forward and backward of a rank's layer: its inputs, outputs and gradients by step."""
    GROUPS.local.group, layer, results = group, layers[rank], []
    for step, length in enumerate(lengths):
        x, grad = (tokens(seed + rank + 10 * step, length[rank], hidden=H, dtype=dtype) for seed in (100, 500))
        x.requires_grad_()
        layer.zero_grad(set_to_none=True)
        y, l_aux, _ = layer(x)
        assert layer.deepspeed_moe.tile_overlap.backend == "overlap"
        ((y * grad).sum() + 3 * l_aux).backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"x": x.detach(), "grad": grad, "y": y.detach(), "x.grad": x.grad, **grads})
        overlap_group.check_failure(group.pool.failure, peers)
    return results


FORMS = {
    "mlp": lambda: mlp(H, 40, bias=False),
    "mlp bias": lambda: mlp(H, 40),
    "gated": lambda: Gated(H, 40),
    "gated bias": lambda: Gated(H, 40, bias=True),
}


@pytest.mark.parametrize(
    "size,form,k,dtype,grouped,options",
    [
        (2, "gated", 2, torch.bfloat16, True, {"combine": "sums"}),
        (2, "gated", 2, torch.bfloat16, True, {"combine": "rows"}),
        (2, "gated", 3, torch.float16, False, {"combine": "sums", "comm_sms": 2}),
        (2, "mlp", 1, torch.float16, False, {"combine": "rows", "owner_alignment": "tile"}),
        (
            2,
            "gated",
            2,
            torch.bfloat16,
            True,
            {"combine": "sums", "overlap_dispatch": False},
        ),
        (4, "gated", 3, torch.float16, True, {"combine": "sums", "recompute_dispatch": True}),
        (2, "mlp bias", 2, torch.bfloat16, False, {"recompute_dispatch": True}),
        (2, "gated bias", 3, torch.float16, True, {"combine": "rows"}),
        (4, "mlp", 4, torch.bfloat16, False, {"combine": "rows", "comm_sms": 2, "bands_per_segment": 1}),
        (8, "gated", 2, torch.float16, True, {}),
    ],
    ids=str,
)
def test_layer(op, monkeypatch, size, form, k, dtype, grouped, options):
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    full = fill(stock(FORMS[form](), num_experts=E, hidden=H, k=k), std=0.1)
    lengths = [(37,) * size, tuple(5 + 90 * (r % 2) for r in range(size)), tuple(50 * (r == 0) for r in range(size))]
    pools = ThreadPools(size, op)
    layers = [layer_of(rank, pools.peers[rank], full.to(dtype), options, grouped) for rank in range(size)]
    results = pools.run(_train, layers, lengths, dtype)
    reference = ours(full.to(dtype).float(), "reference")
    for step in range(len(lengths)):
        reference.zero_grad(set_to_none=True)
        for rank, result in enumerate(results):
            got = result[step]
            x, gate = got["x"].float().requires_grad_(), reference.deepspeed_moe.gate.wg.weight
            gate.grad = None
            y, l_aux, _ = reference(x)
            ((y * got["grad"].float()).sum() + 3 * l_aux).backward()
            expected = {"y": y.detach(), "x.grad": x.grad, "deepspeed_moe.gate.wg.weight": gate.grad}
            errors = relative_errors(
                {n: got[n] for n in expected if len(x)}, {n: v for n, v in expected.items() if len(x)}
            )
            assert max(errors.values(), default=0) <= ERRORS[dtype], (step, rank, errors)
        # An expert's gradient is that of all ranks' tokens.
        local = E // size
        for name, parameter in reference.named_parameters():
            prefix, found, rest = name.partition("deepspeed_experts.")
            if found:
                index, _, rest = rest.partition(".")
                mine = results[int(index) // local][step][f"{prefix}{found}{int(index) % local}.{rest}"]
                errors = relative_errors({name: mine}, {name: parameter.grad})
                assert errors[name] <= ERRORS[dtype] or not parameter.grad.any(), (step, errors)
                assert parameter.grad.any() or not mine.any()


def _infer_and_train(rank, group, peers, layers, lengths, dtype):
    GROUPS.local.group = group
    with torch.inference_mode():
        layers[rank](tokens(rank, lengths[0][rank], hidden=H, dtype=dtype))
    return _train(rank, group, peers, layers, lengths, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_inference_before_training(op, monkeypatch, form):
    """What a layer keeps from an inference is of use in training."""
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    full = fill(stock(FORMS[form](), num_experts=E, hidden=H, k=2), std=0.1).bfloat16()
    results = []
    for function in (_train, _infer_and_train):
        pools = ThreadPools(2, op)
        layers = [layer_of(rank, pools.peers[rank], full, {}, True) for rank in range(2)]
        results.append(pools.run(function, layers, [(40, 30)], torch.bfloat16))
    for (expected,), (got,) in zip(*results, strict=True):
        assert all(torch.equal(got[name], value) for name, value in expected.items())


def _deep(rank, group, peers, layers, steps, delays):
    """Several layers on one pool, forward and backward, with kernels that start late: name -> ms."""
    hold_up(group.op, delays, seed=rank + 1)
    GROUPS.local.group, results = group, []
    for step in range(steps):
        # Rank 0 alone has tokens in every third step: the others may then run ahead of it.
        x = tokens(rank + 10 * step, 0 if step % 3 == 2 and rank else 30 + 20 * rank, hidden=H, dtype=torch.float16)
        y = x.requires_grad_()
        for layer in layers[rank]:
            layer.zero_grad(set_to_none=True)
            y = y + layer(y)[0]
        y.sum().backward()
        results += [y.detach(), x.grad, *(p.grad for layer in layers[rank] for p in layer.parameters())]
        overlap_group.check_failure(group.pool.failure, peers)
    return results


@pytest.mark.parametrize("combine", ["rows", "sums"])
def test_whatever_the_timing(op, monkeypatch, combine):
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    full = [fill(stock(Gated(H, 40), num_experts=E, hidden=H), seed=i, std=0.1).half() for i in range(2)]
    results = []
    for delays in ({}, {"*": 4.0}):
        pools = ThreadPools(2, op)
        layers = [[layer_of(r, pools.peers[r], each, {"combine": combine}, True) for each in full] for r in range(2)]
        results.append(pools.run(_deep, layers, 4, delays))
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(results[0][rank], results[1][rank], strict=True))


def _late_peer(rank, group, peers, layers, steps):
    late = {"expert_gemm": 50.0, "place_tokens": 50.0} if rank == 1 else {}
    return _deep(rank, group, peers, layers, steps, late)


@pytest.mark.parametrize("guard", [None, *GUARDS])
def test_every_guard_is_needed(op, monkeypatch, tmp_path, guard):
    """With a peer that is late results are right; without a guard they are wrong, or positions out of range."""
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    full = fill(stock(Gated(H, 40), num_experts=E, hidden=H), std=0.1).half()

    def run(op, function, *arguments):
        pools = ThreadPools(2, op)
        layers = [[layer_of(rank, pools.peers[rank], full, {"combine": "sums"}, True)] for rank in range(2)]
        return pools.run(function, layers, 2, *arguments)

    expected = run(op, _deep, {})
    broken = build(tmp_path, [GUARDS[guard]]) if guard else op
    if guard == "routes are read after they came":
        # Positions out of range would be written to: only the layout may run.
        plans = ThreadPools(2, broken).run(_late_layout)
        good = ThreadPools(2, op).run(_late_layout)
        assert not all(torch.equal(a, b) for p, q in zip(plans, good) for a, b in zip(p, q))
        return
    got = run(broken, _late_peer)
    same = all(torch.equal(a, b) for r in range(2) for a, b in zip(got[r], expected[r], strict=True))
    assert same == (guard is None)


def _late_layout(rank, group, peers):
    hold_up(group.op, {"place_tokens": 50.0} if rank == 1 else {})
    config = TileOverlapConfig(enabled=True)
    plan = symmetric_layout.Counting(random_routes(rank, 40, 2, E), E, peers, group, config, 128, True).finish()
    return plan.choice_rows.clone(), plan.row_weights.clone()


def _one_leaves(rank, group, peers):
    if rank == 1:
        return None
    config = TileOverlapConfig(enabled=True)
    with pytest.raises(PeerError, match="rank 0: the counts of rank 1 did not come within"):
        symmetric_layout.Counting(random_routes(1, 20, 2, 8), 8, peers, group, config, 128, True).finish()
    return True


def test_a_rank_that_never_comes_is_named(op, monkeypatch):
    monkeypatch.setattr(symmetric_layout, "WATCHDOG_MARGIN_S", -5.0)
    assert ThreadPools(2, op, timeout_s=1.0).run(_one_leaves) == [True, None]


def _memory(rank, group, peers, layers, lengths):
    """What a layer saves for backward, and what its channels hold, step by step; and each step's Plan."""
    GROUPS.local.group, layer, found = group, layers[rank], []
    for step, length in enumerate(lengths):
        KEPT.tensors = None
        layer(tokens(rank + step, length[rank], hidden=H, dtype=torch.bfloat16).requires_grad_())
        plan, tensors = KEPT.tensors
        capacities = {name: getattr(group.pool, name).capacity_bytes for name in ("tokens", "returns")}
        found.append((plan, sum(t.numel() * t.element_size() for t in tensors), capacities))
    return found


KEPT = threading.local()


@pytest.mark.parametrize("again", [False, True])
def test_memory_is_what_the_formulas_say(op, monkeypatch, again):
    size, k, inner = 2, 2, 40
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())
    monkeypatch.setattr(buffer, "GRAIN_BYTES", 16)
    keep = sequential.RoutedMLP.keep

    def recorded(ctx, x, weights, kept, plan, pre_activations, *rest):
        KEPT.tensors = plan, [t for t in (x, weights, kept, *plan.tensors(), *pre_activations) if t is not None]
        keep(ctx, x, weights, kept, plan, pre_activations, *rest)

    monkeypatch.setattr(sequential.RoutedMLP, "keep", staticmethod(recorded))
    full = fill(stock(Gated(H, inner), num_experts=E, hidden=H, k=k), std=0.1).bfloat16()
    pools, lengths = ThreadPools(size, op), [(40, 30), (20, 10), (300, 0)]
    layers = [
        layer_of(rank, pools.peers[rank], full, {"combine": "rows", "recompute_dispatch": again}, True)
        for rank in range(size)
    ]
    results = pools.run(_memory, layers, lengths)
    room = {"tokens": 0, "returns": 0}
    for step in range(len(lengths)):
        for rank, result in enumerate(results):
            plan, saved, capacities = result[step]
            length, rows = lengths[step][rank], sum(plan.expert_counts)
            sent, received = sum(plan.send_splits), sum(plan.recv_splits)
            values = length * H + rows * (2 * inner + (0 if again else H))
            numbers = length * k * 4 + sent + received * k + 2 * rows + E // size + 1 + 2 * size * (E + size + 1)
            assert saved == 2 * values + 4 * numbers
            if rank == 0:
                arriving, returning = max(map(sum, zip(*plan.remote_sends))), max(map(sum, plan.remote_routes))
                most = {"tokens": 2 * arriving, "returns": max(map(sum, plan.routes_between))}
                for name, needed in (("tokens", arriving), ("returns", returning)):
                    if needed * 2 * H > room[name]:
                        room[name] = max(needed * 2 * H, min(int(needed * 2 * H * 1.25), most[name] * 2 * H))
            assert all(room[name] <= capacities[name] < room[name] + 16 for name in room), (room, capacities)


def _stacked(rank, group, peers, weights, activation, trained):
    """The routed part of one rank with stacked experts: inputs, output and gradients."""
    local, inner = E // peers.size, weights["w1"].shape[1]
    mine = GroupedExperts(H, inner, local, use_grouped_mm=False, activation=activation, activation_limit=LIMIT)
    for name, value in weights.items():
        part = value[rank * local : (rank + 1) * local].clone()
        setattr(mine, name, torch.nn.Parameter(part, requires_grad=trained))
    routes = random_routes(rank, 50 + 20 * rank, 2, E)
    x = (tokens(rank, len(routes.experts), hidden=H) * 4).round().div(4).half().requires_grad_()
    routes.weights.requires_grad_()
    config = TileOverlapConfig(enabled=True)
    counting = symmetric_layout.Counting(routes, E, peers, group, config, 2 * H, True)
    stacked = StackedExperts(mine)
    assert overlap.refusal(stacked, torch.float16, E, 2, group.op) is None
    y = overlap.routed_experts(x, routes.weights, stacked, counting, nullcontext)
    y.sum().backward()
    grads = {name: p.grad for name, p in mine.named_parameters()}
    return {
        "x": x.detach(),
        "routes": routes,
        "y": y.detach(),
        "x.grad": x.grad,
        "w.grad": routes.weights.grad,
        **grads,
    }


LIMIT = 0.75


@pytest.mark.parametrize(
    "activation,biased,trained",
    [
        ("swiglu", False, True),
        ("swiglu", False, False),
        ("swiglu_clamped", False, True),
        ("swiglu_oai", False, True),
        ("swiglu_oai", True, True),
    ],
    ids=["swiglu", "frozen", "clamped", "oai", "GPT-OSS"],
)
def test_stacked_experts(op, monkeypatch, activation, biased, trained):
    """One parameter for each projection, whose gradient comes as one tensor."""
    size, inner = 2, 40
    shapes = {"w1": (E, inner, H), "w2": (E, H, inner), "w3": (E, inner, H)}
    if biased:
        shapes |= {f"{name}_bias": shape[:2] for name, shape in shapes.items()}
    # Such numbers, and those of x, that projections are exact: none is rounded across a limit, many lie at it.
    weights = {
        name: (tokens(i, *shape[:-1], hidden=shape[-1]) * 2).round().div(16).half()
        for i, (name, shape) in enumerate(shapes.items())
    }
    joined, gated = [], overlap.project_gated_arriving
    monkeypatch.setattr(overlap, "project_gated_arriving", lambda *inputs: joined.append(1) or gated(*inputs))
    results = ThreadPools(size, op).run(_stacked, weights, activation, trained)
    assert len(joined) == (0 if biased else size), "the GEMM makes the hidden rows where no bias comes before"
    exact = {name: w.double().requires_grad_() for name, w in weights.items()}
    total = 0.0

    def linear(x, name, expert):
        return F.linear(x, exact[name][expert], exact[f"{name}_bias"][expert] if biased else None)

    for result in results:
        x, w = result["x"].double().requires_grad_(), result["routes"].weights.detach().double().requires_grad_()
        y = torch.zeros(len(x), H, dtype=torch.float64)
        for choice in range(2):
            for expert in range(E):
                chosen = (result["routes"].experts[:, choice] == expert).nonzero().squeeze(1)
                gate, up = linear(x[chosen], "w1", expert), linear(x[chosen], "w3", expert)
                hidden = EXPERT_ACTIVATIONS[activation].fn(gate, up, 1.702, LIMIT)
                y = y.index_add(0, chosen, w[chosen, choice, None] * linear(hidden, "w2", expert))
        x_grad, w_grad = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        total = total + y.sum()
        errors = relative_errors(result, {"y": y.detach(), "x.grad": x_grad, "w.grad": w_grad})
        assert max(errors.values()) <= ERRORS[torch.float16], errors
    if not trained:
        assert not any(result[name] is not None for result in results for name in weights)
        return
    total.backward()
    local = E // size
    for rank, result in enumerate(results):
        mine = slice(rank * local, (rank + 1) * local)
        errors = relative_errors(result, {name: w.grad[mine] for name, w in exact.items()})
        assert max(errors.values()) <= ERRORS[torch.float16], errors
