"""Hugging Face models through DeepSpeed's AutoEP: with our stages they compute and train as without them."""

import json
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed import comm
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS, GroupedExperts
from hf_models import FAMILIES, KEYS, SMALL, VARIANTS, batch, model_of
from models import assert_close
from torch.autograd import grad

from ds_tileoverlap import versions
from ds_tileoverlap.exchange import HostCopy
from ds_tileoverlap.stacked_experts import ACTIVATION_OF

STEPS = 10


def engine_of(family, ep_size, backend, zero=0, file=None, **options):
    """An engine whose config is given as a dict, or as ``file`` that the arguments name."""
    preset, model = model_of(family)
    block = {"tile_overlap": {"enabled": True, "backend": backend}} if backend else {}
    keys = VARIANTS.get(family, {} if backend else KEYS.get(family, {}))
    keys = {**keys, "preset_model": preset} if preset else keys
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "expert_parallel": {"enabled": True, "autoep_size": ep_size, **keys},
        "steps_per_print": 10**9,
        **block,
        **options,
    }
    if file is None:
        return deepspeed.initialize(model=model, config=config)[0]
    file = f"{file}{comm.get_rank()}.json"
    Path(file).write_text(json.dumps(config))
    arguments = SimpleNamespace(deepspeed_config=file)
    engine = deepspeed.initialize(arguments, model)[0]
    assert arguments.deepspeed_config == file
    return engine


def _train(family, ep_size, backend, zero):
    engine = engine_of(family, ep_size, backend, zero)
    layers = [m for m in engine.module.modules() if hasattr(m, "_is_autoep_layer")]
    assert {type(m).__name__ for m in layers} == {"TileAutoEPMoELayer" if backend else "AutoEPMoELayer"}
    logits, losses = engine.module(batch(0)).logits.detach(), []
    for step in range(STEPS):
        ids = batch(step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if backend:
        assert {m.tile_overlap.backend for m in layers} == {"sequential" if backend == "auto" else backend}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return logits, losses, weights


def _same(family, ep_size, backend, zero):
    plain = model_of(family)[1](batch(0)).logits.detach()
    logits, losses, expected = _train(family, ep_size, None, zero)
    got_logits, got_losses, got = _train(family, ep_size, backend, zero)
    assert (got_logits - logits).abs().max() < 1e-4
    assert ((logits - plain).abs().max() < 1e-4) == (family not in VARIANTS)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    start = dict(model_of(family)[1].named_parameters())
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 2e-6 + 1e-4 * value.abs().max(), name
        if name in start and start[name].shape == value.shape and "experts" not in name:
            assert start[name].numel() < 2 or not torch.equal(start[name], value), f"{name} does not train"


@pytest.mark.parametrize("backend", ["sequential", "reference"])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_autoep_does(two_ranks, family, ep_size, backend):
    two_ranks(_same, family, ep_size, backend, 0)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("family,zero", [*(("qwen3_moe", zero) for zero in (1, 2, 3)), ("qwen2_moe", 3)])
def test_under_zero(two_ranks, family, zero, ep_size):
    two_ranks(_same, family, ep_size, "auto", zero)


def _shared_first():
    """The order in which a layer with shared experts calls its parts: theirs while the counts are on their way."""
    engine, order = engine_of("qwen2_moe", 2, "auto"), []
    layer = next(m for m in engine.module.modules() if hasattr(m, "_is_autoep_layer"))
    shared = layer.shared_experts
    shared.register_forward_hook(lambda *_: order.append("shared experts"))
    wait = HostCopy.wait
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(HostCopy, "wait", lambda self: order.append("counts") or wait(self))
        engine.module(batch(0))
    assert order == ["shared experts", "counts", "counts"] and layer.shared_experts is shared


def test_shared_experts_run_before_the_host_waits(two_ranks):
    two_ranks(_shared_first)


def _train_on_gpu(family, backend, zero):
    engine = engine_of(family, 2, backend, zero, bf16={"enabled": True})
    layers = [m for m in engine.module.modules() if hasattr(m, "_is_autoep_layer")]
    with torch.no_grad():
        logits, losses = engine.module(batch(0).to(engine.device)).logits.float(), []
    for step in range(STEPS):
        ids = batch(step).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if backend:
        assert {m.tile_overlap.backend for m in layers} == {backend}
    return logits, losses


def _same_on_gpus(family, zero):
    expected, expected_losses = _train_on_gpu(family, None, zero)
    for backend in ("overlap", "sequential"):
        logits, losses = _train_on_gpu(family, backend, zero)
        error = (logits - expected).norm() / expected.norm()
        assert error <= 2e-2, (backend, error)
        assert losses == pytest.approx(expected_losses, rel=1e-2), backend


@pytest.mark.gpu(2)
@pytest.mark.parametrize("family,zero", [*((family, 0) for family in FAMILIES), ("qwen3_moe", 2), ("qwen3_moe", 3)])
def test_trains_as_autoep_does_on_gpus(two_gpus, family, zero):
    two_gpus(_same_on_gpus, family, zero)


@pytest.mark.parametrize("name", ACTIVATION_OF)
def test_activations_are_autoeps(name):
    """Also at the clamps and beyond them, and in second derivatives."""
    gate, up = torch.randn(2, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate[0], up[0], up[1] = 0.75, 0.75, -0.75
    found = []
    for act in (ACTIVATION_OF[name](1.702, 0.75), lambda g, u: EXPERT_ACTIVATIONS[name].fn(g, u, 1.702, 0.75)):
        inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        hidden = act(*inputs)
        first = grad(hidden.square().sum(), inputs, create_graph=True)
        found.append((hidden, *first, *grad(sum(g.square().sum() for g in first), inputs)))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def _refused(change, message):
    with pytest.raises((ValueError, ImportError), match=message):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            engine_of("mixtral", 1, "auto")


def _other_version(patch):
    patch.setattr(versions.metadata, "version", lambda name: "5.23.1")


def _other_activation(patch):
    patch.setitem(EXPERT_ACTIVATIONS, "other", EXPERT_ACTIVATIONS["swiglu"])
    init = GroupedExperts.__init__
    patch.setattr(GroupedExperts, "__init__", lambda self, **kw: init(self, **{**kw, "activation": "other"}))


def _weights_before_several_experts(patch):
    patch.setitem(VARIANTS, "mixtral", {"score_apply": "pre"})


@pytest.mark.parametrize(
    "change,message",
    [
        (_weights_before_several_experts, r"before its experts \(score_apply: 'pre'\) and sends a token to 2 of them"),
        (_other_version, r"transformers: got 5.23.1, expected >=5.12,<5.23"),
        (_other_activation, r"'model.layers.0.mlp': its experts' activation is 'other', not one of 'swiglu'"),
    ],
    ids=["score_apply", "version", "activation"],
)
def test_what_cannot_run_is_refused(two_ranks, change, message):
    two_ranks(_refused, change, message)


def _hooked():
    engine = engine_of("qwen3_moe", 2, "auto")
    layer = next(m for m in engine.module.modules() if type(m).__name__ == "TileAutoEPMoELayer")
    seen = []
    with torch.no_grad():
        expected = engine.module(batch(0)).logits
        layer.experts.register_forward_hook(lambda *_: seen.append(1))
        got = engine.module(batch(0)).logits
    assert seen and torch.allclose(got, expected, atol=1e-5)


def test_a_hook_on_the_experts_sees_their_inputs(two_ranks):
    two_ranks(_hooked)


def _train_hooked(backend, ep_size, hook, zero):
    """Losses and weights of steps of which the second has ``hook`` on rank 0's experts."""
    engine, losses = engine_of("qwen3_moe", ep_size, backend, zero), []
    layers = [m for m in engine.module.modules() if type(m).__name__ == "TileAutoEPMoELayer"]
    for step in range(3):
        hooked = layers if hook is not None and step == 1 and comm.get_rank() == 0 else []
        handles = [layer.experts.register_forward_hook(hook) for layer in hooked]
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        [handle.remove() for handle in handles]
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _same_hooked(backend, ep_size, zero):
    seen = []
    losses, weights = _train_hooked(backend, ep_size, None, zero)
    got_losses, got = _train_hooked(backend, ep_size, lambda _, inputs, output: seen.append((inputs, output)), zero)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    assert_close(got, weights, 1e-4)
    assert len(seen) == (2 if comm.get_rank() == 0 else 0)
    for (rows, counts), output in seen:
        assert rows.shape == output.shape and rows.shape[1] == SMALL["hidden_size"] and counts.sum() <= len(rows)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("backend", ["sequential", "reference"])
def test_a_hook_on_one_rank(two_ranks, backend, ep_size, zero):
    """It gets expert rows as AutoEP makes them, and no rank waits for AutoEP's exchanges."""
    two_ranks(_same_hooked, backend, ep_size, zero, limit_s=45.0)


def _train_compiled(family, is_compiled):
    engine, losses = engine_of(family, 2, "sequential"), []
    if is_compiled:
        torch.compiler.reset()
        engine.compile(backend="eager")
    for step in range(3):
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _same_compiled(family):
    losses, weights = _train_compiled(family, False)
    got_losses, got = _train_compiled(family, True)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    assert_close(got, weights, 1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_compiled_trains_as_without(two_ranks, family):
    two_ranks(_same_compiled, family)


def _from_a_file(folder):
    engine = engine_of("olmoe", 2, "auto", file=f"{folder}/config")
    plain = model_of("olmoe")[1](batch(0)).logits.detach()
    assert (engine.module(batch(0)).logits.detach() - plain).abs().max() < 1e-4


def test_the_config_may_be_a_file_that_the_arguments_name(two_ranks, tmp_path):
    two_ranks(_from_a_file, str(tmp_path))
