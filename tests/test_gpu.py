"""On GPUs: equal to DeepSpeed's layer and to the reference backend, deterministic, and clean where memory is dirty."""

import pytest
import torch
from models import ERRORS, Gated, backward_of, fill, mlp, ours, relative_errors, stock, tokens

from ds_tileoverlap import expert_gemm, layout
from ds_tileoverlap.exchange import Peers


def _layers(form, dtype, hidden, intermediate, **options):
    rank, device = torch.distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    expert = {"mlp": mlp, "gated": Gated, "gated_bias": lambda *size: Gated(*size, bias=True)}[form](
        hidden, intermediate
    )
    layer = fill(stock(expert, ep_size=2, hidden=hidden, **options), ep_rank=rank, std=0.3 / hidden**0.5 * 8**0.5)
    layer = layer.to(device, dtype)
    mine = ours(layer)
    layer.set_deepspeed_parallelism()
    mine.set_deepspeed_parallelism()
    return layer, mine, device


def _parity(form, dtype, k, drop, hidden, intermediate, num_experts, shape):
    layer, mine, device = _layers(form, dtype, hidden, intermediate, k=k, drop_tokens=drop, num_experts=num_experts)
    rank = torch.distributed.get_rank()
    x, grad = (tokens(seed + rank, *shape, hidden=hidden, dtype=dtype).to(device) for seed in (10, 20))
    expected, got = backward_of(layer, x, grad), backward_of(mine, x, grad)
    assert torch.equal(got.pop("counts"), expected.pop("counts"))
    errors = relative_errors(got, expected)
    assert max(errors.values()) <= ERRORS[dtype], errors
    again = backward_of(mine, x, grad)
    assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(
    "form,k,drop", [("mlp", 1, True), ("gated", 2, False), ("gated_bias", 3, True), ("gated_bias", 3, False)]
)
def test_equals_stock(two_gpus, form, k, drop, dtype):
    two_gpus(_parity, form, dtype, k, drop, 64, 128, 8, (3, 67))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("num_tokens", [1, 7, 33, 257])
@pytest.mark.parametrize("hidden,intermediate", [(1024, 1408), (2880, 2880), (1025, 512), (72, 40), (8192, 1024)])
def test_c26_awkward_shapes(two_gpus, hidden, intermediate, num_tokens):
    two_gpus(_parity, "gated", torch.bfloat16, 2, False, hidden, intermediate, 6, (num_tokens,))


def _unequal(lengths, k):
    _, mine, device = _layers("gated", torch.float32, 64, 128, k=k)
    reference = ours(stock(Gated(), ep_size=2, k=k).to(device), "reference")
    reference.load_state_dict(mine.state_dict())
    reference.set_deepspeed_parallelism()
    rank = torch.distributed.get_rank()
    for step in range(3):
        x, grad = (tokens(seed + rank + step, lengths[rank]).to(device) for seed in (30, 40))
        expected, got = backward_of(reference, x, grad), backward_of(mine, x, grad)
        assert torch.equal(got.pop("counts"), expected.pop("counts"))
        assert max(relative_errors(got, expected).values()) <= 2e-5


@pytest.mark.gpu(2)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(4, 64), (1, 4096), (0, 64), (0, 0)], ids=str)
def test_c01_unequal_tokens(two_gpus, lengths, k):
    two_gpus(_unequal, lengths, k)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("counts", [(162, 0, 2577, 446, 0, 83), (1, 7, 127, 0), (0, 0, 5)], ids=str)
def test_c03_weight_gradient_of_idle_experts(counts):
    hidden, intermediate, device = 2048, 768, torch.device("cuda")
    offsets = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
    host = torch.tensor([[*counts, 0, 0]], dtype=torch.int32)
    plan = layout.Plan(Peers(None, 0, (0,), 0.0, "test"), host, *[None] * 7, row_offsets=offsets)
    for step in range(20):
        torch.manual_seed(step)
        grads = torch.randn(sum(counts), intermediate, device=device, dtype=torch.bfloat16)
        rows = torch.randn(sum(counts), hidden, device=device, dtype=torch.bfloat16)
        dirt = [
            torch.full((len(counts), intermediate, hidden), float("nan"), device=device).bfloat16() for _ in range(3)
        ]
        del dirt
        found = expert_gemm.weight_grads(grads, rows, plan)
        starts = plan.expert_starts
        for expert, count in enumerate(counts):
            if count == 0:
                assert torch.equal(found[expert], torch.zeros_like(found[expert]))
            else:
                mine = slice(starts[expert], starts[expert + 1])
                exact = grads[mine].double().t() @ rows[mine].double()
                assert (found[expert].double() - exact).norm() <= 5e-3 * exact.norm()
