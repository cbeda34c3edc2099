"""The overlap backend: who decides that it runs; on two GPUs equal to the other backends, whatever the timing."""

from types import SimpleNamespace

import pytest
import torch
from models import (
    ERRORS,
    Gated,
    T,
    assert_close,
    backward_of,
    fill,
    mlp,
    ours,
    relative_errors,
    stock,
    tanh_mlp,
    tokens,
)

from ds_tileoverlap import close, layout, overlap, overlap_group, route, schedule, symmetric_layout
from ds_tileoverlap.config import TileOverlapConfig
from ds_tileoverlap.exchange import peers_of
from ds_tileoverlap.local_experts import LocalExperts
from ds_tileoverlap.op_builder.tileoverlap import TileOverlapBuilder


def _fallback(reasons):
    """Two layers and steps where a rank's machine has a reason not to overlap; returns what was logged."""
    rank, said = torch.distributed.get_rank(), []
    kept = overlap_group._refusal, TileOverlapBuilder.refusal, TileOverlapBuilder.load, overlap_group.say
    overlap_group.say = lambda line, **options: said.append(line)
    overlap_group._GROUPS.clear()
    overlap_group._refusal = lambda device: reasons[rank]
    TileOverlapBuilder.refusal, TileOverlapBuilder.load = lambda self: None, lambda self: SimpleNamespace(MAX_PEERS=8)
    try:
        for _ in range(2):
            layer = fill(stock(Gated(), ep_size=2), ep_rank=rank)
            mine, expected = ours(layer, "overlap"), ours(layer, "sequential")
            for each in (mine, expected):
                each.set_deepspeed_parallelism()
            for step in range(2):
                x, grad = tokens(rank + step, T), tokens(9 + rank, T)
                assert_close(backward_of(mine, x, grad), backward_of(expected, x, grad))
    finally:
        overlap_group._refusal, TileOverlapBuilder.refusal, TileOverlapBuilder.load, overlap_group.say = kept
        overlap_group._GROUPS.clear()
    return said


@pytest.mark.parametrize("reasons", [("no peer access", None), (None, "no peer access")], ids=str)
def test_c27_one_rank_that_cannot_decides_for_all(two_ranks, reasons):
    said, other = two_ranks(_fallback, reasons)
    rank = 0 if reasons[0] else 1
    assert said == [f"sequential instead of overlap, as no peer access (rank {rank})"]
    assert other == []


def test_refusals_name_the_reason():
    op = SimpleNamespace(MAX_EXPERTS=16)

    def reason(expert, dtype=torch.bfloat16, num_experts=8, top_k=2, shift=0):
        layer = stock(expert, hidden=expert_hidden(expert)).to(dtype)
        for parameter in layer.deepspeed_moe.experts.parameters():
            padded = torch.zeros(parameter.numel() + shift, dtype=dtype)
            parameter.data = padded[shift:].view_as(parameter)
        experts = LocalExperts(layer.deepspeed_moe.experts.deepspeed_experts)
        return overlap.refusal(experts, dtype, num_experts, top_k, op)

    assert reason(Gated()) is None
    assert "only runs as it is" in reason(tanh_mlp())
    assert "torch.float32, not in bfloat16 or float16" in reason(Gated(), torch.float32)
    assert reason(mlp()) is None
    assert "sizes 64 and 30 are not multiples of 8" in reason(Gated(64, 30))
    assert "do not begin at multiples of 16 bytes" in reason(Gated(), shift=1)
    assert "goes to 33 experts, more than 32" in reason(Gated(), top_k=33)
    assert "has 17 experts, more than 16" in reason(Gated(), num_experts=17)


def expert_hidden(expert):
    return next(expert.parameters()).shape[1]


def test_falls_back_on_cpu(two_ranks):
    (said,), _ = two_ranks(_fallback, ("the layer runs on cpu, not on a GPU",) * 2)
    assert "runs on cpu" in said


FORMS = {"mlp": mlp, "gated": Gated, "gated bias": lambda *size: Gated(*size, bias=True)}


def overlapped(form, dtype, hidden, intermediate, options=None, **layer_options):
    """A layer on the overlap backend, and an equal one on the reference backend in float64."""
    rank, device = torch.distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    expert = FORMS[form](hidden, intermediate)
    layer = fill(stock(expert, ep_size=2, hidden=hidden, **layer_options), ep_rank=rank, std=0.8 / hidden**0.5)
    layer = layer.to(device, dtype)
    mine, reference = ours(layer, "overlap", **(options or {})), ours(layer.float(), "reference")
    for each in (mine, reference):
        each.set_deepspeed_parallelism()
    return mine, reference, device


def returns_of(layer):
    """How many forwards and backwards of the layer's group returned rows so far."""
    group = overlap_group._GROUPS.get(layer.deepspeed_moe.ep_group)
    return int(group.pool.returns.epoch) if group else 0


def _parity(form, dtype, hidden, intermediate, num_experts, lengths, k, options):
    mine, reference, device = overlapped(form, dtype, hidden, intermediate, options, k=k, num_experts=num_experts)
    rank = torch.distributed.get_rank()
    for step, length in enumerate(lengths):
        x, grad = (tokens(seed + rank + step, length[rank], hidden=hidden, dtype=dtype).to(device) for seed in (10, 20))
        before = returns_of(mine)
        got = backward_of(mine, x, grad)
        assert returns_of(mine) == before + 2, "the layer did not overlap in forward and backward"
        expected = backward_of(reference, x.float(), grad.float())
        same_routes = torch.equal(got.pop("counts"), expected.pop("counts"))
        assert same_routes
        errors = relative_errors(got, expected)
        assert max(errors.values()) <= ERRORS[dtype], errors
        again = backward_of(mine, x, grad)
        assert all(torch.equal(again[name], got[name]) for name in got)


def _closed():
    mine, _, device = overlapped("gated", torch.bfloat16, 64, 128, k=2, num_experts=8)
    x, found = tokens(1 + torch.distributed.get_rank(), 300, hidden=64, dtype=torch.bfloat16).to(device), []
    for _ in range(2):
        found.append(backward_of(mine, x, x))
        pool = overlap_group._GROUPS[mine.deepspeed_moe.ep_group].pool
        close()
        assert not overlap_group._GROUPS and not any(channel.capacity_bytes for channel in pool.channels)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.gpu(2)
def test_memory_is_freed_and_made_anew(two_gpus):
    two_gpus(_closed)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form,k", [("mlp", 1), ("gated", 2), ("gated bias", 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"combine": "rows"},
        {"combine": "sums", "recompute_dispatch": True},
        {"combine": "rows", "comm_sms": 2, "bands_per_segment": 1},
        {"combine": "sums", "comm_sms": 4},
        {"combine": "rows", "owner_alignment": "tile"},
    ],
    ids=str,
)
def test_equals_reference(two_gpus, form, k, dtype, options):
    lengths = [(33, 33), (700, 500), (700, 500), (1, 257), (0, 64), (64, 0), (0, 0), (2000, 3)]
    two_gpus(_parity, form, dtype, 64, 128, 8, lengths, k, options)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("combine", ["rows", "sums"])
@pytest.mark.parametrize("hidden,intermediate", [(1024, 1408), (2880, 2880), (72, 40), (8192, 1024), (2048, 768)])
def test_awkward_shapes(two_gpus, hidden, intermediate, combine):
    two_gpus(_parity, "gated", torch.bfloat16, hidden, intermediate, 6, [(257, 257), (1, 900)], 2, {"combine": combine})


def _same_plan(lengths, k, num_experts, combine):
    rank, device = torch.distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    peers = peers_of(torch.distributed.group.WORLD, device, None, "test")
    group = overlap_group.group_of(peers, device)
    assert group.op is not None, group.reason
    for step, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * step + rank)
        scores = torch.rand(length[rank], num_experts, generator=generator)
        experts = scores.topk(k, 1).indices.int()
        experts[torch.rand(experts.shape, generator=generator) < 0.2] = -1
        weights = torch.rand(experts.shape, generator=generator)
        routes = route.Routes(experts.to(device), weights.to(device), None, None)
        config = TileOverlapConfig(enabled=True, combine=combine)
        expected = layout.layout(routes, num_experts, peers)
        got = symmetric_layout.Counting(routes, num_experts, peers, group, config, 128, True).finish()
        assert torch.equal(got.counts, expected.counts)
        assert got.tally == expected.tally and got.tally.all_can_overlap
        for name in set(layout._TENSOR_FIELDS) - {"slots"}:
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        sent = (expected.token_slots.cpu(), expected.sends) if got.returns.sums else None
        slots = schedule.plain_slots(experts, expected.routes, rank, sent)
        assert torch.equal(got.slots.cpu(), slots)
    refused = symmetric_layout.Counting(routes, num_experts, peers, group, config, 128, rank == 0).finish()
    assert not refused.tally.all_can_overlap and refused.first_that_cannot_overlap == 1


@pytest.mark.gpu(2)
@pytest.mark.parametrize("combine", ["rows", "sums"])
@pytest.mark.parametrize("k,num_experts", [(1, 2), (2, 8), (3, 60), (8, 128), (5, 1024)])
def test_layout_through_symmetric_memory_equals_the_other(two_gpus, k, num_experts, combine):
    two_gpus(_same_plan, [(33, 33), (700, 500), (0, 64), (64, 0), (0, 0), (1, 2000)], k, num_experts, combine)
