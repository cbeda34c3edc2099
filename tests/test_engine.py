"""Under DeepSpeed's engine: gradient scale, ZeRO, activation checkpointing, dtypes, evaluation, breakdown."""

from contextlib import ExitStack
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, safe_get_full_fp32_param
from engines import (
    BACKENDS,
    EXPERTS,
    HIDDEN,
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
from models import Gated, assert_close, fill, mlp, tokens
from torch.utils.checkpoint import checkpoint

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block


def _scale_worker(zero, accumulate):
    found = {}
    for ep_size in (1, 2):
        for backend in (STOCK, *BACKENDS):
            net = net_of(ep_size)
            before = weights_of(net)
            train(engine_of(net, backend, zero, gradient_accumulation_steps=accumulate), range(2 * accumulate))
            names = ["layers.0.deepspeed_moe.gate.wg.weight", "head.weight"]
            if comm.get_rank() == 0:
                names += [n for n in before if "deepspeed_experts.0." in n]
            found[ep_size, backend] = {name: changes(net, before)[name] for name in names}
    for other in found.values():
        assert all(change.any() for change in other.values())
        assert_close(other, found[1, STOCK])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_c08_gradient_scale(two_ranks, zero, accumulate):
    two_ranks(_scale_worker, zero, accumulate)


def _equal_worker(zero, layers, options, config):
    assert_same_training(lambda: net_of(2, layers, **options), zero=zero, **config)


@pytest.mark.parametrize(
    "options,config",
    [
        ({"k": 1}, {"optimizer": "Adam", "lr": 1e-2, "rtol": 1e-3}),
        ({"k": 3, "form": Gated}, {"gradient_clipping": 0.5}),
        ({"k": 2, "drop_tokens": True, "capacity_factor": 0.6, "use_residual": True}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 2])
def test_training_equals_stock(two_ranks, zero, options, config):
    two_ranks(_equal_worker, zero, 2, options, config)


FP32_ACCUMULATION = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _own_groups_worker(zero, dtype, config):
    def build():
        return net_of(4, form=lambda *sizes: mlp(*sizes, bias=False))

    # In bf16 routes may differ after a step.
    tolerance = {} if dtype == torch.float32 else {"rtol": 5e-2, "lr": 2.0, "steps": 1}
    assert_same_training(build, zero=zero, dtype=dtype, group_size=1, **tolerance, **config)


@pytest.mark.parametrize(
    "zero,dtype,config",
    [
        (0, torch.float32, {}),
        (1, torch.float32, {}),
        (2, torch.float32, {}),
        (0, torch.bfloat16, {"bf16": {"enabled": True}}),
        (1, torch.bfloat16, FP32_ACCUMULATION),
    ],
    ids=str,
)
def test_one_group_for_each_expert_matrix(four_ranks, zero, dtype, config):
    """A flat buffer of ZeRO then holds just one matrix, which looks as if nobody had placed it."""
    four_ranks(_own_groups_worker, zero, dtype, config)


def _buckets_worker():
    options = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 500}
    assert_same_training(lambda: net_of(2, 4), steps=20, rtol=1e-4, zero=2, lr=0.1, zero_optimization=options)


def test_c11_overlapped_reduction_in_small_buckets(two_ranks):
    two_ranks(_buckets_worker)


RECOMPUTE = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "deepspeed": lambda layer, x: deepspeed.checkpointing.checkpoint(layer, x),
}


def _recompute_worker(how, backend, options):
    found = []
    for recompute in (None, RECOMPUTE[how]):
        torch.manual_seed(comm.get_rank())
        net = net_of(2, 2, **options)
        net.recompute = recompute and (lambda layer, x, call=recompute: call(layer, x.requires_grad_()))
        before = weights_of(net)
        engine = engine_of(net, backend, zero=1)
        losses = train(engine, range(3))
        found.append({"losses": torch.tensor(losses), **changes(net, before)})
    assert all(change.any() for change in found[0].values())
    assert_close(found[1], found[0], 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"k": 2}, {"k": 1, "use_rts": True, "drop_tokens": True}], ids=str)
@pytest.mark.parametrize("how", RECOMPUTE)
def test_c09_activation_checkpointing(two_ranks, how, options, backend):
    two_ranks(_recompute_worker, how, backend, options)


def masters_of(net):
    """The optimizer's float32 copies of the weights."""
    return {name: safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}


def _bf16_worker(k):
    found = {}
    for backend in (STOCK, *BACKENDS):
        net = net_of(2, k=k)
        engine = engine_of(net, backend, zero=1, bf16={"enabled": True})
        before = masters_of(net)
        train(engine, range(2), torch.bfloat16)
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        assert engine(batch(9)[0].bfloat16())[0].dtype == torch.bfloat16
        found[backend] = {name: value - before[name] for name, value in masters_of(net).items()}
        assert all(change.any() for change in found[backend].values())
    for backend in BACKENDS:
        assert_close(found[backend], found[STOCK], 5e-2)


@pytest.mark.parametrize("k", [1, 2])
def test_bf16_with_zero_1(two_ranks, k):
    two_ranks(_bf16_worker, k)


def _overflow_worker(zero):
    found = {}
    for backend in (STOCK, *BACKENDS):
        net = net_of(2)
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1000}
        engine = engine_of(net, backend, zero, fp16=fp16)
        train(engine, range(1), torch.float16)
        assert engine.skipped_steps == 0 and engine.optimizer.cur_scale == 2**8
        before, masters = weights_of(net), masters_of(net)
        x, seed = batch(1)
        y, l_aux = engine(x.half())
        assert y.isfinite().all()
        engine.backward(loss_of((y * (1e3 if comm.get_rank() == 1 else 1), l_aux), seed))
        engine.step()
        assert engine.skipped_steps == 1 and engine.optimizer.cur_scale == 2**7
        assert not any(change.any() for change in changes(net, before).values())
        train(engine, range(2, 3), torch.float16)
        assert engine.skipped_steps == 1
        found[backend] = {name: value - masters[name] for name, value in masters_of(net).items()}
        assert all(change.any() for change in found[backend].values())
    for backend in BACKENDS:
        assert_close(found[backend], found[STOCK], 2e-2)


@pytest.mark.skipif(not get_accelerator().is_fp16_supported(), reason="this accelerator does not compute in fp16")
@pytest.mark.parametrize("zero", [1, 2])
def test_c30_overflow_on_one_rank(two_ranks, zero):
    two_ranks(_overflow_worker, zero)


def _eval_worker(backend, k):
    nets = {
        kind: net_of(2, 2, k=k, drop_tokens=True, capacity_factor=2.0, eval_capacity_factor=0.5)
        for kind in (STOCK, backend)
    }
    engines = {kind: engine_of(net, kind, zero=1) for kind, net in nets.items()}
    x, _ = batch(0)
    outputs = {}
    for kind, engine in engines.items():
        trained = engine(x)[0].detach()
        engine.eval()
        with torch.no_grad():
            y, l_aux = engine(x)
        assert not y.requires_grad and not torch.allclose(y, trained)  # evaluation drops at another capacity
        outputs[kind] = {"y": y, "l_aux": l_aux}
        engine.train()
        train(engine, range(2))
    assert_close(outputs[backend], outputs[STOCK])
    assert_close(weights_of(nets[backend]), weights_of(nets[STOCK]), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 2])
def test_evaluation_between_steps(two_ranks, backend, k):
    two_ranks(_eval_worker, backend, k)


LENGTHS = [(5, 12), (0, 7), (31, 1), (8, 0), (0, 0), (3, 3)]


def _lengths_worker(ep_size, backend, k):
    """Against plain SGD on one process that sees both ranks' tokens."""
    rank, lr = comm.get_rank(), 0.5
    net = net_of(ep_size, 2, k=k)
    engine = engine_of(net, backend, zero=2, lr=lr)
    alone = fill(Net(1, 2, k=k))
    for step, lengths in enumerate(LENGTHS):
        x, seed = batch(step, length=lengths[rank])
        y, l_aux = engine(x)
        engine.backward((y * tokens(seed, len(x), hidden=HIDDEN)).sum() / 20 + 0.1 * l_aux)
        engine.step()
        alone.zero_grad()
        for other, length in enumerate(lengths):
            if length:
                x, seed = batch(step, other, length)
                y, l_aux = alone(x)
                ((y * tokens(seed, length, hidden=HIDDEN)).sum() / 20 + 0.1 * l_aux).div(2).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter -= lr * parameter.grad if parameter.grad is not None else 0.0
    for name, value in weights_of(net).items():
        if "deepspeed_experts." in name:
            local = int(name.split("deepspeed_experts.")[1].split(".")[0])
            name = name.replace(f"experts.{local}.", f"experts.{local + rank % ep_size * (EXPERTS // ep_size)}.")
        assert_close({name: value}, {name: alone.get_parameter(name).detach()}, 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_lengths_vary_by_step_and_rank(two_ranks, ep_size, k, backend):
    two_ranks(_lengths_worker, ep_size, backend, k)


def _arrivals_worker(ep_size, backend):
    net = net_of(ep_size, 2)
    engine, names = engine_of(net, backend, zero=2), []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    x, seed = batch(0, length=(0, 7)[comm.get_rank()])
    engine.backward(loss_of(engine(x), seed))
    assert len(names) == len(list(net.parameters()))
    return names


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_gradients_arrive_in_the_same_order(two_ranks, ep_size, backend):
    """ZeRO-2 fills its buckets as gradients come and sums them over ranks place by place."""
    first, second = two_ranks(_arrivals_worker, ep_size, backend)
    assert first == second


def _breakdown_worker(backend, options, config):
    net = net_of(2, 2, **options)
    engine = engine_of(net, backend, steps_per_print=1, **config)
    with patch.object(deepspeed.runtime.engine, "log_dist") as log:
        train(engine, range(2))
    for layer in (layer.deepspeed_moe for layer in net.layers):
        assert 0 < layer.gate.gate_time < layer.time_moe
        assert layer.time_falltoall > 0 and layer.time_salltoall > 0
        assert layer.time_falltoall + layer.time_salltoall < layer.time_moe
    return [call.args[0] for call in log.call_args_list if "1st_a2a" in call.args[0]]


# The profiler looks at rank 0 alone, in a step that is not one of these.
PROFILED = {"flops_profiler": {"enabled": True, "profile_step": 9}}


@pytest.mark.parametrize("config", [{"wall_clock_breakdown": True}, PROFILED], ids=["breakdown", "profiler"])
@pytest.mark.parametrize("drop_tokens", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wall_clock_breakdown(two_ranks, backend, drop_tokens, config):
    """Also where the gate itself is called, which times itself."""
    lines, _ = two_ranks(_breakdown_worker, backend, {"drop_tokens": drop_tokens}, config)
    assert len(lines) == 2 and not any("fwd_moe: 0.00" in line or "top_k: 0.00" in line for line in lines)


def _zero_3_worker(backend):
    with pytest.raises(AssertionError) as error:
        engine_of(net_of(2), backend, zero=3)
    return str(error.value)


def test_zero_3_is_refused_as_upstream(two_ranks):
    stock, mine = two_ranks(_zero_3_worker, STOCK), two_ranks(_zero_3_worker, "sequential")
    assert mine == stock and "ZeRO Stage 3" in mine[0]


def _data_first_worker(data_first):
    # Groups of this test alone, so that it may choose the order of ranks.
    with ExitStack() as stack:
        for name in [n for n in vars(groups) if n.startswith("_EXPERT_") and "PARALLEL_GROUP" in n]:
            stack.enter_context(patch.dict(getattr(groups, name), clear=True))
        _check_data_first(data_first)


def _check_data_first(data_first):
    rank = comm.get_rank()
    place = rank // 2 if data_first else rank % 2
    assert_same_training(lambda: fill(Net(2, 2), ep_rank=place), zero=1, use_data_before_expert_parallelism=data_first)
    ranks = comm.get_all_ranks_from_group(groups._get_expert_parallel_group("ep_size_2"))
    assert ranks == ([rank % 2, rank % 2 + 2] if data_first else [rank // 2 * 2, rank // 2 * 2 + 1])


@pytest.mark.parametrize("data_first", [False, True])
def test_data_before_expert_parallelism(four_ranks, data_first):
    four_ranks(_data_first_worker, data_first)
