"""Equal to DeepSpeed's layer: outputs, loss, counts and gradients, over options, forms and expert-parallel sizes."""

import pytest
import torch
from models import E, Gated, assert_close, backward_of, fill, mlp, ours, stock, tokens

BACKENDS = ("sequential", "reference")
FORMS = {
    "mlp": mlp,
    "mlp_no_bias": lambda: mlp(bias=False),
    "relu": lambda: mlp(act=torch.nn.ReLU),
    "gated": Gated,
    "gated_bias": lambda: Gated(bias=True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "k,drop,factor",
    [
        (1, False, 1.0),
        (1, True, 0.5),
        (2, False, 1.0),
        (2, True, 0.7),
        (2, True, 2.0),
        (3, False, 1.0),
        (3, True, 0.6),
        (E, False, 1.0),
    ],
)
def test_one_rank(k, drop, factor, form, backend):
    layer = fill(stock(FORMS[form](), k=k, drop_tokens=drop, capacity_factor=factor))
    mine = ours(layer, backend)
    x, grad = tokens(1, 3, 11), tokens(2, 3, 11)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


def _ep_worker(ep_size, k, drop, form, shape, backend):
    rank = torch.distributed.get_rank()
    layer = stock(FORMS[form](), k=k, ep_size=ep_size, drop_tokens=drop, capacity_factor=0.8)
    fill(layer, ep_rank=rank % ep_size)
    mine = ours(layer, backend)
    layer.set_deepspeed_parallelism()
    mine.set_deepspeed_parallelism()
    x, grad = tokens(10 + rank, *shape), tokens(20 + rank, *shape)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(33,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize(
    "k,drop,form",
    [
        (1, True, "mlp"),
        (1, False, "gated"),
        (2, True, "gated_bias"),
        (2, False, "mlp"),
        (3, True, "gated"),
        (3, False, "gated_bias"),
    ],
)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_expert_parallel(four_ranks, ep_size, k, drop, form, shape, backend):
    four_ranks(_ep_worker, ep_size, k, drop, form, shape, backend)


def _recompute_worker(frozen):
    rank = torch.distributed.get_rank()
    layer = fill(stock(Gated(), ep_size=2), ep_rank=rank)
    if frozen == "rank 1" and rank == 1:
        layer.deepspeed_moe.experts.requires_grad_(False)
    kept, again = ours(layer), ours(layer, recompute_dispatch=True)
    x, grad = tokens(10 + rank, 20 + 9 * rank), tokens(20 + rank, 20 + 9 * rank)
    found, saved = [], ([], [])
    for mine, sizes in zip((kept, again), saved):
        mine.set_deepspeed_parallelism()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            found.append(backward_of(mine, x, grad))
    num_rows, rest = divmod(sum(saved[0]) - sum(saved[1]), x.shape[1])
    assert num_rows > 0 and rest == 0
    assert_close(found[1], found[0], 0.0)


@pytest.mark.parametrize("frozen", [None, "rank 1"])
def test_dispatch_again_in_backward(two_ranks, frozen):
    """Equal gradients from fewer saved values, also where one rank alone wants no weight gradients."""
    two_ranks(_recompute_worker, frozen)
