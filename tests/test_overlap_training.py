"""Training on two GPUs with the overlap backend equals training with the sequential one, however DeepSpeed trains."""

import functools

import pytest
import torch
from engines import Net, engine_of, weights_of
from models import Gated, fill, relative_errors, tokens
from torch.utils.checkpoint import checkpoint

from ds_tileoverlap import configure

pytestmark = pytest.mark.gpu(2)

HIDDEN, INNER, TOKENS, STEPS = 64, 128, 96, 6
# What the rounding of bf16 makes of one step's gradients, and of what several steps change: sequential and reference
# differ by up to 0.17 there, in a router, where near ties fall otherwise.
NOISE, NOISE_OF_STEPS = 3e-2, 3e-1
RECOMPUTE = {
    None: None,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
}


def gated_net(recompute=None):
    """Two layers of experts without biases, the same weights on every call."""
    net = Net(2, 2, form=Gated, hidden=HIDDEN, inner=INNER)
    net.recompute = RECOMPUTE[recompute]
    return fill(net, ep_rank=torch.distributed.get_rank(), std=0.08)


def batch_of(step):
    """A step's tokens; their number differs between ranks and steps."""
    rank = torch.distributed.get_rank()
    return tokens(100 * step + rank, TOKENS - 30 * rank * (step % 2), hidden=HIDDEN).cuda().bfloat16()


def loss_on_gpu(output, seed):
    y, l_aux = output
    return (y.float() * tokens(seed, len(y), hidden=HIDDEN).cuda()).sum() / 20 + 0.1 * l_aux


def _train(backend, recompute, config):
    net = gated_net(recompute)
    engine = engine_of(net, backend, lr=0.1, bf16={"enabled": True}, **config)
    losses = []
    for step in range(STEPS):
        loss = loss_on_gpu(engine(batch_of(step).requires_grad_(recompute is not None)), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    used = {layer.deepspeed_moe.tile_overlap.backend for layer in net.layers}
    assert used == {backend}, used
    engine.destroy()
    return losses, weights_of(net)


def _same_training(recompute, config):
    losses, expected = _train("sequential", recompute, config)
    found_losses, found = _train("overlap", recompute, config)
    start = weights_of(gated_net().cuda())
    changes = [{name: w[name] - start[name] for name in w} for w in (found, expected)]
    errors = relative_errors(*changes)
    assert max(errors.values()) <= NOISE_OF_STEPS, errors
    # One loss is a sum in which much cancels: its rounding errors are small beside the losses, not beside itself.
    errors = relative_errors({"losses": torch.tensor(found_losses)}, {"losses": torch.tensor(losses)})
    assert errors["losses"] <= NOISE, (found_losses, losses)
    again_losses, again = _train("overlap", recompute, config)
    assert found_losses == again_losses and all(torch.equal(found[n], again[n]) for n in found), "not repeatable"


SMALL_BUCKETS = {"overlap_comm": True, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero,buckets", [(0, {}), (1, {}), (2, SMALL_BUCKETS)], ids=str)
def test_equals_sequential(two_gpus, zero, buckets, accumulate, recompute):
    config = {"zero": zero, "zero_optimization": buckets, "gradient_accumulation_steps": accumulate}
    two_gpus(_same_training, recompute, config)


def _several_forwards(backend):
    net = gated_net().cuda().bfloat16()
    layers = ds_layers(net, backend)
    inputs = [batch_of(step).requires_grad_() for step in range(3)]
    outputs = [net(x)[0] for x in inputs]
    for y in reversed(outputs):
        y.float().square().sum().backward(retain_graph=True)
    # The first graph once more: what its backward counted down must start again.
    outputs[0].float().square().sum().backward()
    assert {layer.deepspeed_moe.tile_overlap.backend for layer in layers} == {backend}
    return {
        **{f"x{i}": x.grad for i, x in enumerate(inputs)},
        **{n: p.grad for n, p in net.named_parameters() if p.grad is not None},
    }


def ds_layers(net, backend):
    configure(net, {"tile_overlap": {"enabled": True, "backend": backend}})
    for layer in net.layers:
        layer.set_deepspeed_parallelism()
    return net.layers


def _same_gradients():
    expected, found = _several_forwards("sequential"), _several_forwards("overlap")
    errors = relative_errors(found, expected)
    assert max(errors.values()) <= NOISE, errors


def test_several_forwards_before_a_backward_and_one_twice(two_gpus):
    two_gpus(_same_gradients)
