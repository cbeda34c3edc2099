"""Tensor parallelism through ``groups.mpu``: replicated tokens, and sharded experts."""

from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.utils import groups
from engines import BACKENDS, EXPERTS, HIDDEN, INNER, STOCK
from models import PLAIN, assert_close, fill, mlp, tokens
from ranks import Ranks
from torch import nn

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block


class Mpu:
    """Four ranks as two by two: neighbours share tensors, ranks two apart share data."""

    def __init__(self):
        rank = comm.get_rank()
        tensor, data = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        self._tensor = [comm.new_group(ranks) for ranks in tensor][rank // 2]
        self._data = [comm.new_group(ranks) for ranks in data][rank % 2]
        self._rank = rank

    def get_model_parallel_rank(self):
        return self._rank % 2

    def get_data_parallel_rank(self):
        return self._rank // 2

    def get_model_parallel_world_size(self):
        return 2

    def get_data_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self._tensor

    def get_data_parallel_group(self):
        return self._data


class _Reduce(torch.autograd.Function):
    """Sums over the tensor-parallel ranks, in forward (after a row-parallel map) or in backward (before a column)."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward = forward
        return _summed(x, groups.mpu.get_model_parallel_group()) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forward else _summed(grad, groups.mpu.get_model_parallel_group()), None


def _summed(tensor, group):
    tensor = tensor.contiguous().clone()
    comm.all_reduce(tensor, group=group)
    return tensor


class Sharded(nn.Module):
    """The MLP of :func:`mlp` with its inner features split over the tensor-parallel ranks."""

    def __init__(self, hidden=HIDDEN, inner=INNER):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner // 2), nn.Linear(inner // 2, hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        return _Reduce.apply(self.down(F.gelu(self.up(_Reduce.apply(x, False)))), True) + self.bias

    def take(self, whole):
        """Copies this rank's shard of a whole MLP's values."""
        with torch.no_grad():
            for name, value in _shards(whole[0].weight, whole[0].bias, whole[2].weight, whole[2].bias).items():
                self.get_parameter(name).copy_(value)


def _shards(up_weight, up_bias, down_weight, down_bias):
    part = slice(comm.get_rank() % 2 * INNER // 2, (comm.get_rank() % 2 + 1) * INNER // 2)
    return {
        "up.weight": up_weight[part],
        "up.bias": up_bias[part],
        "down.weight": down_weight[:, part],
        "bias": down_bias,
    }


def _flat_all_gather(output, tensor, all_gather=comm.all_gather_into_tensor, **options):
    """Gloo wants both flat, DeepSpeed's ``gather_tokens`` brings blocks; NCCL takes either."""
    return all_gather(output, tensor.flatten(), **options)


def _layer_grads(layer, x, grad):
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y, l_aux, counts = layer(x)
    ((y * grad).sum() + 3 * l_aux).backward()
    return {"y": y.detach(), "x.grad": x.grad, "l_aux": l_aux.detach(), "counts": counts}


def _expected(lengths, options):
    """A whole layer without any parallelism, its results by data-parallel rank, and its experts' gradients summed."""
    with patch.object(groups, "mpu", None):
        alone = fill(StockMoE(HIDDEN, mlp(HIDDEN, INNER), EXPERTS, **options))
        by_rank, sums = [], 0
        for data_rank, length in enumerate(lengths):
            x, grad = tokens(data_rank, length, hidden=HIDDEN), tokens(10 + data_rank, length, hidden=HIDDEN)
            found = _layer_grads(alone, x, grad)
            by_rank.append({**found, "gate": alone.deepspeed_moe.gate.wg.weight.grad})
            experts = [[p.grad for p in e.parameters()] for e in alone.deepspeed_moe.experts.deepspeed_experts]
            sums = experts if data_rank == 0 else [[a + b for a, b in zip(*pair)] for pair in zip(sums, experts)]
    return alone, by_rank, sums


def _tensor_parallel_worker(sharded, backend, k, drop, lengths):
    groups.mpu = groups.mpu or Mpu()
    data_rank, options = comm.get_rank() // 2, {**PLAIN, "k": k, "drop_tokens": drop}
    alone, by_rank, sums = _expected(lengths, options)
    form = Sharded() if sharded else mlp(HIDDEN, INNER)
    layer = StockMoE(HIDDEN, form, EXPERTS, 2, enable_expert_tensor_parallelism=sharded, **options)
    ds_tileoverlap.configure(layer, {"tile_overlap": {"enabled": backend is not STOCK, "backend": backend or "auto"}})
    layer.set_deepspeed_parallelism()
    assert groups._get_expert_model_parallel_world_size() == 1 + sharded
    ranks = comm.get_all_ranks_from_group(layer.deepspeed_moe.ep_group)
    assert ranks == ([comm.get_rank() % 2, comm.get_rank() % 2 + 2] if sharded else [2 * data_rank, 2 * data_rank + 1])
    place = ranks.index(comm.get_rank())
    fill(layer, ep_rank=place)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    if sharded:
        for local, expert in enumerate(experts):
            expert.take(alone.deepspeed_moe.experts.deepspeed_experts[local + place * len(experts)])

    length = lengths[data_rank]
    x, grad = tokens(data_rank, length, hidden=HIDDEN), tokens(10 + data_rank, length, hidden=HIDDEN)
    with patch.object(deepspeed.comm, "all_gather_into_tensor", _flat_all_gather):
        found = _layer_grads(layer, x, grad)
    assert_close({**found, "gate": layer.deepspeed_moe.gate.wg.weight.grad}, by_rank[data_rank], 2e-5)
    # Each rank saw a part of the tokens of its experts; ranks with the same experts hold the sum together.
    same_experts = groups._get_expert_data_parallel_group("ep_size_2")
    for local, expert in enumerate(experts):
        got = {name: _summed(p.grad, same_experts) for name, p in expert.named_parameters()}
        whole = sums[local + place * len(experts)]
        names = [name for name, _ in expert.named_parameters()]
        assert_close(got, _shards(*whole) if sharded else dict(zip(names, whole)), 2e-5)


@pytest.fixture(scope="module")
def sharded_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def tensor_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


SHARED = pytest.mark.parametrize(
    "backend,drop,lengths",
    [(STOCK, True, (16, 16))]  # what DeepSpeed takes: equal lengths, even capacities
    + [(b, *case) for b in BACKENDS for case in ((True, (16, 16)), (False, (13, 13)), (False, (7, 20)))],
    ids=str,
)


@SHARED
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tensor_parallel_tokens(tensor_ranks, k, backend, drop, lengths):
    """Every tensor-parallel rank holds the same tokens, and its own experts."""
    tensor_ranks(_tensor_parallel_worker, False, backend, k, drop, lengths)


@SHARED
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tensor_parallel_experts(sharded_ranks, k, backend, drop, lengths):
    """Every tensor-parallel rank holds the same tokens, and a shard of the same experts."""
    sharded_ranks(_tensor_parallel_worker, True, backend, k, drop, lengths)
