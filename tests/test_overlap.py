"""The overlap backend on two GPUs: equal to the other backends, and safe whatever the timing."""

import pytest
import torch
from models import Gated, backward_of, fill, mlp, ours, stock, tokens
from test_gpu import ERRORS, relative_errors

from ds_tileoverlap import buffer


def overlapped(form, dtype, hidden, intermediate, options=None, **layer_options):
    """A layer on the overlap backend, and an equal one on the reference backend in float64."""
    rank, device = torch.distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    expert = {"mlp": lambda *size: mlp(*size, bias=False), "gated": Gated}[form](hidden, intermediate)
    layer = fill(stock(expert, ep_size=2, hidden=hidden, **layer_options), ep_rank=rank, std=0.8 / hidden**0.5)
    layer = layer.to(device, dtype)
    mine, reference = ours(layer, "overlap", **(options or {})), ours(layer.float(), "reference")
    for each in (mine, reference):
        each.set_deepspeed_parallelism()
    return mine, reference, device


def epoch():
    (pool,) = buffer._POOLS.values()
    return int(pool.epoch)


def _parity(form, dtype, hidden, intermediate, num_experts, lengths, k, options):
    mine, reference, device = overlapped(form, dtype, hidden, intermediate, options, k=k, num_experts=num_experts)
    rank = torch.distributed.get_rank()
    for step, length in enumerate(lengths):
        x, grad = (tokens(seed + rank + step, length[rank], hidden=hidden, dtype=dtype).to(device) for seed in (10, 20))
        before = epoch() if buffer._POOLS else 0
        got = backward_of(mine, x, grad)
        assert epoch() == before + 1, "the layer did not overlap"
        expected = backward_of(reference, x.float(), grad.float())
        same_routes = torch.equal(got.pop("counts"), expected.pop("counts"))
        assert same_routes
        errors = relative_errors(got, expected)
        assert max(errors.values()) <= ERRORS[dtype], errors
        again = backward_of(mine, x, grad)
        assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form,k", [("mlp", 1), ("gated", 2), ("gated", 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"combine": "rows"},
        {"combine": "sums"},
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
