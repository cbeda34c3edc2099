"""Hooks on one rank alone, as DeepSpeed's flops profiler sets them: all ranks still exchange the same."""

import pytest
import torch
from deepspeed import comm
from deepspeed.moe.sharded_moe import TopKGate
from engines import batch, changes, engine_of, loss_of, net_of, train, weights_of
from models import Gated, assert_close, experts_of
from ranks import RankError

STEPS, LIMIT_S = 3, 45.0


def _train(backend, target, hook, zero=0, frozen=False, **options):
    """What the weights change by in steps of which the second has ``hook`` on rank 0's ``target``; the losses."""
    net, losses = net_of(2, 2, **options), []
    for parameter in [p for layer in net.layers for p in layer.deepspeed_moe.experts.parameters()]:
        parameter.requires_grad = not frozen
    before = weights_of(net)
    block = {"enabled": True, "backend": backend.removesuffix(" again")}
    if backend.endswith("again"):
        block["recompute_dispatch"] = True
    engine = engine_of(net, backend, zero, tile_overlap=block)
    for step in range(STEPS):
        hooked = hook is not None and step == 1 and comm.get_rank() == 0
        handles = [target(layer).register_forward_hook(hook) for layer in net.layers] if hooked else []
        x, seed = batch(step)
        loss = loss_of(engine(x), seed)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        [handle.remove() for handle in handles]
    return {"losses": torch.stack(losses), **changes(net, before)}


def _same_with_a_hook(backend, target, options):
    seen = []
    expected = _train(backend, target, None, **options)
    got = _train(backend, target, lambda *_: seen.append(1), **options)
    assert_close(got, expected, 2e-5)
    assert len(seen) == (2 if comm.get_rank() == 0 else 0)


def an_expert(layer):
    return experts_of(layer)[1]


def a_projection(layer):
    return next(m for m in experts_of(layer)[0].modules() if isinstance(m, torch.nn.Linear))


def the_gate(layer):
    return layer.deepspeed_moe.gate


@pytest.mark.parametrize("target", [an_expert, a_projection])
@pytest.mark.parametrize("backend", ["sequential", "sequential again", "reference"])
@pytest.mark.parametrize(
    "options",
    [{}, {"form": Gated, "zero": 2}, {"drop_tokens": True, "min_capacity": 4}, {"frozen": True}],
    ids=["mlp", "gated", "drop", "frozen"],
)
def test_of_an_expert(two_ranks, options, backend, target):
    two_ranks(_same_with_a_hook, backend, target, options, limit_s=LIMIT_S)


def _profiled(backend, options):
    """The flops profiler is on in the second step, on rank 0."""
    found = []
    for config in ({}, {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "/dev/null"}}):
        net = net_of(2, 2, **options)
        before = weights_of(net)
        losses = train(engine_of(net, backend, **config), range(STEPS))
        found.append({"losses": torch.tensor(losses), **changes(net, before)})
    assert_close(found[1], found[0], 2e-5)


@pytest.mark.parametrize("options", [{}, {"drop_tokens": True, "min_capacity": 4}], ids=["dropless", "drop"])
@pytest.mark.parametrize("backend", ["sequential", "reference"])
def test_of_the_flops_profiler(two_ranks, backend, options):
    two_ranks(_profiled, backend, options, limit_s=LIMIT_S)


def _differentiated_twice():
    net = net_of(2)
    engine_of(net, "sequential")
    if comm.get_rank() == 0:
        an_expert(net.layers[0]).register_forward_hook(lambda *_: None)
    x, seed = batch(0)
    return torch.autograd.grad(loss_of(net(x), seed), list(net.layers.parameters()), create_graph=True)


def test_of_an_expert_cannot_be_where_gradients_are_differentiated(two_ranks):
    """Experts of a known form exchange more there than modules do."""
    with pytest.raises(RankError, match="create_graph needs the experts of all ranks .* Put the same hooks on all"):
        two_ranks(_differentiated_twice, limit_s=LIMIT_S)


@pytest.mark.parametrize("drop", [{}, {"drop_tokens": True, "min_capacity": 4}], ids=["dropless", "drop"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("backend", ["sequential", "reference"])
def test_of_a_gate(two_ranks, backend, k, drop):
    """Upstream's gate asks its group for the capacity where nothing is dropped."""
    two_ranks(_same_with_a_hook, backend, the_gate, {"k": k, **drop}, limit_s=LIMIT_S)


class GateThatExchanges(TopKGate):
    def forward(self, *inputs, **kwargs):
        total = torch.ones(1)
        comm.all_reduce(total, group=self.ep_group)
        assert total == 2
        return super().forward(*inputs, **kwargs)


def _with_its_own_gate():
    net = net_of(2, 1)
    net.layers[0].deepspeed_moe.gate.__class__ = GateThatExchanges
    train(engine_of(net, "sequential"), range(1))


def test_a_gate_of_a_class_of_its_own_keeps_its_group(two_ranks):
    two_ranks(_with_its_own_gate, limit_s=LIMIT_S)
