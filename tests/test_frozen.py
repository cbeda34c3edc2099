"""Frozen, unfrozen and added parameters inside experts, under DeepSpeed's engine."""

import importlib.util
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm
from engines import (
    BACKENDS,
    STOCK,
    Net,
    assert_same_training,
    batch,
    changes,
    engine_of,
    loss_of,
    net_of,
    train,
    weights_of,
)
from models import LoRA, assert_close, fill, mlp

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block
from ds_tileoverlap import expert_gemm


def _freeze(net, names):
    for name, parameter in net.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return net


def _frozen_worker(names, zero, calls):
    assert_same_training(lambda: _freeze(net_of(2, 2), names), zero=zero)
    net = _freeze(net_of(2, 2), names)
    engine = engine_of(net, "sequential", zero)
    with patch.object(expert_gemm, "weight_grads", wraps=expert_gemm.weight_grads) as spy:
        train(engine, range(2))
    assert spy.call_count == 2 * calls
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    "names,zero,calls",
    [
        ([], 0, 4),
        ([".experts."], 0, 0),
        (["layers.0.deepspeed_moe.experts."], 1, 2),
        (["layers.0."], 2, 2),
        (["deepspeed_experts.0.2.weight", "deepspeed_experts.1.2.weight"], 1, 2),
        (["gate.wg"], 0, 4),
        (["gate.wg"], 2, 4),
    ],
    ids=str,
)
def test_c15_frozen(two_ranks, names, zero, calls):
    two_ranks(_frozen_worker, names, zero, calls)


def _unfreeze_worker(part):
    found = []
    for backend in (STOCK, *BACKENDS):
        net = net_of(2, 2)
        frozen = {name: p for name, p in net.named_parameters() if part in name}
        _freeze(net, [part])
        before = weights_of(net)
        engine = engine_of(net, backend)
        train(engine, range(2))
        assert not any(changes(net, before)[name].any() for name in frozen)
        for parameter in frozen.values():
            parameter.requires_grad_()
        train(engine, range(2, 4))
        assert all(change.any() for change in changes(net, before).values())
        found.append(changes(net, before))
    for other in found[1:]:
        assert_close(other, found[0], 2e-5)


@pytest.mark.parametrize("part", [".experts.", "gate.wg", "layers.0."])
def test_c15_unfreeze_after_two_steps(two_ranks, part):
    two_ranks(_unfreeze_worker, part)


def _lora(expert):
    expert[0], expert[2] = LoRA(expert[0]), LoRA(expert[2])
    return expert


def _lora_form(hidden, inner):
    return _lora(mlp(hidden, inner))


def _lora_worker(zero):
    assert_same_training(lambda: net_of(2, 2, form=_lora_form), zero=zero)

    def added_later():
        net = Net(2, 2)
        for layer in net.layers:
            for expert in layer.deepspeed_moe.experts.deepspeed_experts:
                for parameter in _lora(expert).parameters():
                    # What splits parameters into groups before the engine exists needs the marks already.
                    parameter.allreduce, parameter.group_name = False, layer.expert_group_name
        return fill(net, ep_rank=comm.get_rank())

    assert_same_training(added_later, zero=zero)


@pytest.mark.parametrize("zero", [0, 2])
def test_c15_lora(two_ranks, zero):
    two_ranks(_lora_worker, zero)


def _form_change_worker():
    """LoRA put in after training has begun: the next forward must see it."""
    net = net_of(2)
    engine = engine_of(net, "sequential")
    train(engine, range(1))
    x, _ = batch(1)
    before = engine(x)[0]
    for expert in net.layers[0].deepspeed_moe.experts.deepspeed_experts:
        _lora(expert)
    fill(net, ep_rank=comm.get_rank())
    with patch.object(expert_gemm, "weight_grads", wraps=expert_gemm.weight_grads) as spy:
        y, l_aux = engine(x)
        engine.backward(loss_of((y, l_aux), 0))
    assert not torch.equal(before, y) and spy.call_count == 0
    assert all((p.grad is not None) == p.requires_grad for p in net.layers[0].deepspeed_moe.experts.parameters())


def test_c15_form_changed_between_steps(two_ranks):
    two_ranks(_form_change_worker)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_c15_peft(two_ranks):
    two_ranks(_peft_worker)


def _peft_worker():
    from peft import LoraConfig, inject_adapter_in_model

    def form(hidden, inner):
        return inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "2"]), mlp(hidden, inner))

    assert_same_training(lambda: net_of(2, form=form), zero=1)
