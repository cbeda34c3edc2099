"""Faults that expert-parallel training meets in the field, on several ranks; a test's name starts with its case."""

import multiprocessing
import os
import random
import re
import time
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm
from deepspeed.utils import groups
from models import E, Gated, T, assert_close, backward_of, dense, fill, mlp, ours, stock, tokens
from ranks import RankError, Ranks
from torch.distributed import PrefixStore, TCPStore, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.utils.checkpoint import checkpoint

from ds_tileoverlap import configure, exchange

BACKENDS = ("sequential", "reference")
EXCHANGES = ((exchange, "_ALL_GATHER"), (torch.distributed, "all_to_all_single"))


def _pair(ep_size, backend, form=mlp, seed=0, data_first=False, **options):
    """This rank's layer, its group's ranks, and a DeepSpeed layer that holds all experts on one rank."""
    mine = ours(stock(form(), ep_size=ep_size, **options), backend)
    mine.set_deepspeed_parallelism(use_data_before_expert_parallel_=data_first)
    group = comm.get_all_ranks_from_group(mine.deepspeed_moe.ep_group)
    fill(mine, seed, ep_rank=group.index(comm.get_rank()))
    return mine, group, fill(stock(form(), **options), seed)


def _batches(seed, lengths):
    return [(tokens(seed + r, n), tokens(seed + 50 + r, n)) for r, n in enumerate(lengths)]


def _dense_backward(layer, x, grad, aux=3.0):
    """``backward_of`` by the dense loop in float64."""
    state = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x = x.double().requires_grad_()
    inner = layer.deepspeed_moe
    y, l_aux, counts = dense(state, x, inner.experts.deepspeed_experts[0], inner.gate.k)
    ((y * grad).sum() + aux * l_aux).backward()
    found = {"y": y.detach(), "l_aux": l_aux.detach(), "x.grad": x.grad, **{n: p.grad for n, p in state.items()}}
    return {"counts": counts, **{name: value.float() for name, value in found.items()}}


def _alone(layer, x, grad):
    """What one rank's tokens give: by DeepSpeed on one rank where tokens are dropped, else by the dense loop."""
    if len(x) == 0:
        zeros = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
        return {"y": x, "l_aux": torch.tensor(0.0), "counts": torch.zeros(E, dtype=torch.long), "x.grad": x, **zeros}
    return backward_of(layer, x, grad) if layer.deepspeed_moe.gate.drop_tokens else _dense_backward(layer, x, grad)


def _of_rank(alone, group):
    """This rank's part of ``{rank: result of its tokens}``: expert gradients are sums over the group's tokens."""
    rank, per_rank = comm.get_rank(), E // len(group)
    found = {name: value for name, value in alone[rank].items() if ".experts." not in name}
    for name in alone[rank]:
        if match := re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name):
            owner, local = divmod(int(match[2]), per_rank)
            if group[owner] == rank:
                found[f"{match[1]}{local}{match[3]}"] = sum(alone[r][name] for r in group)
    return found


def _check(mine, group, layer, batches, rtol=2e-5):
    alone = {rank: _alone(layer, *batches[rank]) for rank in group}
    assert_close(backward_of(mine, *batches[comm.get_rank()]), _of_rank(alone, group), rtol)


@contextmanager
def _exchanges():
    """The names of the exchanges that this rank takes part in meanwhile, in order."""
    names = []

    def counted(name, call):
        return lambda *args, **options: names.append(name) or call(*args, **options)

    with ExitStack() as stack:
        for module, name in EXCHANGES:
            stack.enter_context(patch.object(module, name, counted(name, getattr(module, name))))
        yield names


def _unequal_worker(lengths, k, drop, backend):
    mine, group, alone = _pair(2, backend, k=k, drop_tokens=drop, capacity_factor=0.8)
    for step in range(5):
        _check(mine, group, alone, _batches(step, (8, 8)))
    _check(mine, group, alone, _batches(100, lengths))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop", [False, True], ids=["dropless", "drop"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(4, 64), (16, 64), (1, 4096), (0, 64)], ids=str)
def test_c01_unequal_tokens(two_ranks, lengths, k, drop, backend):
    two_ranks(_unequal_worker, lengths, k, drop, backend)


class ReluSquared(torch.nn.Module):
    """An activation that no kernel knows."""

    def forward(self, x):
        return x.relu().square()


def _steer(layers, experts, batches):
    """Makes every token of ``batches`` choose among ``experts``."""
    for layer in layers:
        with torch.no_grad():
            weight = layer.deepspeed_moe.gate.wg.weight.mul_(0.2)
            weight[:, 0] = -1.0
            weight[experts, 0] = 1.0
    for x, _ in batches:
        # Enough to decide; more would saturate the softmax, whose gradient float32 then cancels away.
        x[:, 0] = 1.5


def _relu_squared_mlp():
    return mlp(act=ReluSquared)


def _idle_worker(experts, lengths, k, drop, form, backend):
    rank = comm.get_rank()
    mine, group, alone = _pair(2, backend, form, k=k, drop_tokens=drop)
    batches = _batches(7, lengths)
    _steer((mine, alone), experts, batches)
    _check(mine, group, alone, batches)
    busy = [f"_experts.{e % (E // 2)}." for e in experts if e // (E // 2) == rank and sum(lengths)]
    idle = [p for name, p in mine.named_parameters() if "_experts." in name and not any(b in name for b in busy)]
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in idle)

    names, (x, grad) = [], batches[rank]
    for frozen in (False, True):
        mine.requires_grad_(not frozen)
        with _exchanges() as forward:
            y, l_aux, _ = mine(x.clone().requires_grad_(rank == 0))
        assert y.requires_grad and l_aux.isfinite() and (frozen or l_aux.requires_grad)
        with _exchanges() as backward:
            ((y * grad).sum() + l_aux).backward()
        names += [forward, backward]
    return names


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [mlp, _relu_squared_mlp])
@pytest.mark.parametrize("k,drop", [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("lengths", [(T, T), (T, 0), (0, 0)], ids=str)
def test_c02_idle_rank(two_ranks, lengths, k, drop, form, backend):
    first, second = two_ranks(_idle_worker, list(range(E // 2)), lengths, k, drop, form, backend)
    assert first == second and all(first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c02_one_busy_expert(two_ranks, backend):
    first, second = two_ranks(_idle_worker, [5], (T, 7), 1, False, Gated, backend)
    assert first == second and all(first)


def _poison_worker(form, backend, k):
    rank = comm.get_rank()
    plain, _, _ = _pair(2, backend, form, k=k)
    poisoned, _, _ = _pair(2, backend, form, k=k)
    torch.use_deterministic_algorithms(True)
    try:
        for step in range(3):
            x, grad = _batches(step, (T, T))[rank]
            torch.utils.deterministic.fill_uninitialized_memory = False
            expected = backward_of(plain, x, grad)
            torch.utils.deterministic.fill_uninitialized_memory = True
            assert torch.empty(9).isnan().all()
            assert_close(backward_of(poisoned, x, grad), expected, 0.0)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [mlp, Gated])
@pytest.mark.parametrize("k", [2, 3])
def test_c06_poisoned_memory(two_ranks, k, form, backend):
    two_ranks(_poison_worker, form, backend, k)


def _placed_worker(k, place, backend):
    mine, group, alone = _pair(2, backend, k=k)
    batches = _batches(3, (T, T))
    if place != "mixed":
        # The first feature decides the rank that all choices (up to the experts it has) fall on.
        for layer in (mine, alone):
            with torch.no_grad():
                layer.deepspeed_moe.gate.wg.weight[:, 0] = torch.tensor([1.0] * (E // 2) + [-1.0] * (E // 2))
        for rank, (x, _) in enumerate(batches):
            x[:, 0] = 5.0 if (rank == 0) == (place == "local") else -5.0
    _check(mine, group, alone, batches, 1e-5)
    counts = mine.deepspeed_moe.exp_counts.view(2, -1).sum(1)
    own = counts[comm.get_rank()].item()
    assert place == "mixed" or k > E // 2 or own == (T * k if place == "local" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["local", "remote", "mixed"])
@pytest.mark.parametrize("k", [1, 2, 3, E])
def test_c07_router_and_input_gradients(two_ranks, k, place, backend):
    two_ranks(_placed_worker, k, place, backend)


RECOMPUTED = {
    "ties": dict(k=2),
    "twins": dict(k=3),
    "rts": dict(k=1, use_rts=True, drop_tokens=True, capacity_factor=0.5),
    "sampling": dict(k=2, top2_2nd_expert_sampling=True),
}


def _checkpoint_worker(case, use_reentrant, backend, dtype):
    rank = comm.get_rank()
    mine, _, _ = _pair(2, backend, **RECOMPUTED[case])
    mine.to(dtype)
    gate = mine.deepspeed_moe.gate.wg.weight
    with torch.no_grad():
        if case == "ties":
            gate.zero_()
        if case == "twins":
            gate[3] = gate[6]

    def run(step, recompute):
        torch.manual_seed(100 * step + rank)
        x, grad = (t.to(dtype) for t in _batches(step, (T, 9))[rank])
        x.requires_grad_()
        mine.zero_grad(set_to_none=True)
        y, l_aux, _ = checkpoint(mine, x, use_reentrant=use_reentrant) if recompute else mine(x)
        ((y * grad).sum() + 3 * l_aux).backward()
        return {"y": y.detach(), "x.grad": x.grad, **{name: p.grad for name, p in mine.named_parameters()}}

    expected = [run(step, False) for step in range(20)]
    with _exchanges() as names:
        got = [run(step, True) for step in range(20)]
    for one, other in zip(got, expected):
        assert_close(one, other, 0.0)
    return names


@pytest.mark.parametrize(
    "backend,dtype",
    [("sequential", torch.float32), ("sequential", torch.bfloat16), ("reference", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("case", RECOMPUTED)
def test_c09_checkpointing(two_ranks, case, use_reentrant, backend, dtype):
    first, second = two_ranks(_checkpoint_worker, case, use_reentrant, backend, dtype)
    assert first == second and first


def _mixed_worker(sizes, data_first, backend):
    # Groups of this test alone, so that it may choose the order of ranks.
    registries = [getattr(groups, name) for name in vars(groups) if re.match("_EXPERT(_DATA)?_PARALLEL_GROUP", name)]
    with ExitStack() as stack:
        for registry in registries:
            stack.enter_context(patch.dict(registry, clear=True))
        _check_mixed(sizes, data_first, backend)


def _check_mixed(sizes, data_first, backend):
    rank, waits = comm.get_rank(), random.Random(comm.get_rank())
    layers = [_pair(ep, backend, seed=ep, data_first=data_first) for ep in sizes]
    batches = _batches(1, (5, T, 1, 17))

    def run(layer_calls, x, grad):
        inputs, losses = x, 0.0
        for call in layer_calls:
            time.sleep(waits.uniform(0, 0.02))
            y, l_aux, _ = call(x)
            x, losses = x + 0.2 * y, losses + l_aux
        ((x * grad).sum() + 3 * losses).backward()
        return {"y": x.detach(), "x.grad": inputs.grad}

    def alone(x, grad):
        states = [{n: p.detach().double().requires_grad_() for n, p in one.named_parameters()} for _, _, one in layers]
        calls = [lambda x, s=state: dense(s, x, mlp(), 2) for state in states]
        found = run(calls, x.double().requires_grad_(), grad)
        found.update({f"{i}.{n}": p.grad for i, state in enumerate(states) for n, p in state.items()})
        return {name: value.float() for name, value in found.items()}

    by_rank = {r: alone(*batch) for r, batch in enumerate(batches)}
    x, grad = batches[rank]
    got = run([mine for mine, _, _ in layers], x.clone().requires_grad_(), grad)
    for i, (mine, group, _) in enumerate(layers):
        assert mine.ep_size == 1 or group[1] - group[0] == (4 // mine.ep_size if data_first else 1)
        got.update({f"{i}.{name}": p.grad for name, p in mine.named_parameters()})
        prefixed = {r: {n: v for n, v in by_rank[r].items() if n.startswith(f"{i}.")} for r in group}
        part = _of_rank(prefixed, group)
        assert_close({name: got[name] for name in part}, part, 2e-5)
    assert_close({n: got[n] for n in ("y", "x.grad")}, {n: by_rank[rank][n] for n in ("y", "x.grad")}, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (4, 2, 1, 2)], ids=str)
def test_c20_groups_smaller_than_the_world(four_ranks, sizes, data_first, backend):
    four_ranks(_mixed_worker, sizes, data_first, backend)


def _absent_worker(fault, limit_s):
    rank = comm.get_rank()
    mine, _, _ = _pair(2, "sequential")
    configure(mine, {"tile_overlap": {"enabled": True, "backend": "sequential", "timeout_s": limit_s}})
    x = tokens(rank, T)
    if rank == 1 and fault == "raises":
        raise ValueError("a broken batch")
    if rank == 1 and fault == "dies":
        os._exit(3)
    if rank == 1 and fault == "never calls":
        return None
    if rank == 1 and fault == "is slow":
        time.sleep(5)
    y, l_aux, _ = mine(x.requires_grad_())
    if rank == 0 and fault == "is slow":
        time.sleep(5)
    y.sum().backward()
    return "done"


@pytest.fixture
def doomed_ranks():
    ranks = Ranks(2, timeout_s=60)
    yield ranks
    ranks.close()


ABSENCES = {
    "raises": "rank 1: .*ValueError: a broken batch",
    "dies": "rank 1: exited with code 3",
    "never calls": "",
}


@pytest.mark.parametrize("fault", ABSENCES)
def test_c16_missing_rank_is_named(doomed_ranks, fault):
    with pytest.raises(RankError) as failure:
        doomed_ranks(_absent_worker, fault, 5)
    assert re.search(r"rank 0: .*PeerError: .*ranks \[1\] did not take part", str(failure.value), re.DOTALL)
    assert re.search(ABSENCES[fault], str(failure.value), re.DOTALL)


def _store_of_rank_0(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.parametrize("dies,missing", [(True, "[0]"), (False, "[0, 2]")])
def test_c16_a_rank_never_blames_itself(monkeypatch, dies, missing):
    """The store lives in rank 0 and goes with it; while it is there, whoever did not report in time is missing."""
    pipe, theirs = multiprocessing.Pipe()
    rank_0 = multiprocessing.get_context("spawn").Process(target=_store_of_rank_0, args=(theirs,), daemon=True)
    rank_0.start()
    store = TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(exchange, "ROLL_CALL_S", 1.0)
    report = PrefixStore.set

    def report_and_lose(self, key, value):
        report(self, key, value)
        if dies:
            rank_0.kill()
            rank_0.join()

    monkeypatch.setattr(PrefixStore, "set", report_and_lose)
    error = exchange.peer_error(exchange.Peers(None, 1, (0, 1, 2), 5.0, "test"), "dispatch", "it broke")
    assert f"failed on rank 1: of the expert-parallel ranks [0, 1, 2], ranks {missing} did not take part" in str(error)
    rank_0.kill()


def test_c16_slow_rank_is_waited_for(doomed_ranks):
    assert doomed_ranks(_absent_worker, "is slow", 8) == ["done", "done"]


def _limits_worker(limits):
    mine, _, _ = _pair(2, "sequential")
    group, device = mine.deepspeed_moe.ep_group, torch.device("cpu")
    return [exchange.peers_of(group, device, limit_s, "test").timeout_s for limit_s in limits]


def test_timeout_s_is_the_limit_in_place_of_torchs_default(doomed_ranks):
    found = doomed_ranks(_limits_worker, (None, 7, 3000.5, None))
    assert found == [[default_pg_timeout.total_seconds(), 7, 3000.5, 3000.5]] * 2


def _only_first_worker():
    mine, _, _ = _pair(1, "sequential")
    return backward_of(mine, tokens(0, T), tokens(1, T))["counts"].sum().item() if comm.get_rank() == 0 else None


def test_c16_one_caller_without_expert_parallelism(two_ranks):
    assert two_ranks(_only_first_worker) == [2 * T, None]
