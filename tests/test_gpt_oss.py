"""GPT-OSS on our stages: computes and trains as plain transformers, is saved, loaded, and goes back to its names."""

import copy

import pytest
import torch
from deepspeed import comm
from gpt_oss_models import ADAM, LR, engine_of, model_of
from models import relative_errors
from torch import nn

from ds_tileoverlap import gpt_oss
from ds_tileoverlap.gpt_oss import TileGptOssMLP, all_experts, hf_state_dict

transformers = pytest.importorskip("transformers")

STEPS = 10


def batch(step, rank=None, length=12):
    rank = comm.get_rank() if rank is None else rank
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))


def plain_loss(model, step, length=12):
    """What the engine's ranks average."""
    ids = [batch(step, rank, length).to(model.device) for rank in range(comm.get_world_size())]
    return sum(model(input_ids=i, labels=i).loss for i in ids) / len(ids)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        assert (got[name] - value).abs().max() <= 2e-6 + 1e-4 * value.abs().max(), name


def of_parameters(model, of):
    """What ``of`` makes of each parameter of a converted model, under transformers' names."""
    found = {name: of(p) for name, p in model.named_parameters() if "deepspeed_moe" not in name}
    for name, module in model.named_modules():
        if isinstance(module, TileGptOssMLP):
            found |= {f"{name}.experts.{key}": value for key, value in all_experts(module, of).items()}
    return found


def _gradients(ep_size, backend):
    plain = model_of()
    engine = engine_of(model_of(), ep_size, backend)
    ids = batch(0)
    output = engine(input_ids=ids, labels=ids, output_router_logits=True)
    expected = plain(input_ids=ids, output_router_logits=True)
    assert (output.logits - expected.logits).abs().max() < 1e-4
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(output.router_logits, expected.router_logits))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    plain_loss(plain, 0).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert_same(of_parameters(engine.module, lambda p: p.grad), gradients)
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("backend", ["sequential", "reference"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_logits_and_gradients_are_transformers(two_ranks, ep_size, backend):
    two_ranks(_gradients, ep_size, backend)


def _train(engine, steps):
    for step in steps:
        ids = batch(step)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def _trains(ep_size, zero):
    plain, engine = model_of(), engine_of(model_of(), ep_size, zero=zero)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain_loss(plain, step).backward()
        optimizer.step()
    _train(engine, range(STEPS))
    state = hf_state_dict(engine.module)
    assert (state is None) == (ep_size == 2 and comm.get_rank() == 1)
    if state is not None:
        assert_same(state, plain.state_dict())


@pytest.mark.parametrize("ep_size,zero", [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2)])
def test_trains_as_transformers(two_ranks, ep_size, zero):
    two_ranks(_trains, ep_size, zero)


def _compiled():
    states = []
    for is_compiled in (False, True):
        engine = engine_of(model_of(), 2)
        if is_compiled:
            torch.compiler.reset()
            engine.compile(backend="eager")
        _train(engine, range(3))
        states.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    assert_same(states[1], states[0])


def test_compiled_trains_as_without(two_ranks):
    two_ranks(_compiled)


def _goes_back(folder, ep_size):
    plain, engine = model_of(), engine_of(model_of(), ep_size)
    state = hf_state_dict(engine.module)
    if comm.get_rank() == 0:
        expected = plain.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        engine.module.save_pretrained(folder, state_dict=state)
        loaded = transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@pytest.mark.parametrize("ep_size", [1, 2])
def test_weights_go_back_to_transformers_bitwise(two_ranks, tmp_path, ep_size):
    two_ranks(_goes_back, str(tmp_path), ep_size)


def _resumes(folder, zero):
    engine = engine_of(model_of(), 2, zero=zero, algorithm=ADAM)
    _train(engine, range(2))
    engine.save_checkpoint(folder)
    saved = hf_state_dict(engine.module)
    other = engine_of(model_of(seed=1), 2, zero=zero, algorithm=ADAM)
    other.load_checkpoint(folder)
    alone = engine_of(model_of(seed=1), 1, algorithm=ADAM)
    alone.load_checkpoint(folder, load_module_only=True)
    loaded = hf_state_dict(alone.module)
    assert saved is None or all(torch.equal(loaded[name], value) for name, value in saved.items())
    for each in (engine, other):
        _train(each, range(2, 4))
    for (name, a), b in zip(engine.module.named_parameters(), other.module.parameters()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("zero", [0, 1])
def test_resumes_from_deepspeeds_checkpoint(two_ranks, tmp_path, zero):
    """On as many ranks with the optimizer's state; the weights alone on any number."""
    two_ranks(_resumes, str(tmp_path), zero)


def _with_an_optimizer(as_list):
    model = model_of()
    if as_list:
        options = {"model_parameters": list(model.parameters())}
    else:
        options = {"optimizer": torch.optim.SGD(model.parameters(), lr=LR)}
    engine = engine_of(model, 2, **options)
    before = copy.deepcopy({name: p.detach() for name, p in engine.module.named_parameters()})
    _train(engine, range(1))
    for name, parameter in engine.module.named_parameters():
        assert not torch.equal(before[name], parameter), name


@pytest.mark.parametrize("as_list", [True, False], ids=["list", "optimizer"])
def test_parameters_that_the_caller_holds_are_followed(two_ranks, as_list):
    two_ranks(_with_an_optimizer, as_list)


def _refused(change, options, message):
    model = model_of()
    change(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=message):
        engine_of(model, **{"ep_size": 2, **options})
    assert not any(isinstance(module, TileGptOssMLP) for module in model.modules())


def _nothing(mlp):
    pass


def _other_experts(mlp):
    mlp.experts = nn.Identity()


def _five_experts(mlp):
    mlp.experts.num_experts = 5


@pytest.mark.parametrize(
    "change,options,message",
    [
        (_nothing, {"ep_size": 3}, r"expert_parallel.autoep_size: got 3, expected a divisor of 2, the ranks"),
        (
            _nothing,
            {"ep_size": "2", "zero": 3},
            r"expert_parallel.autoep_size: got '2', .*; zero_optimization.stage: got 3",
        ),
        (_other_experts, {}, r"'model.layers.1.mlp': its experts are Identity, not GptOssExperts"),
        (_five_experts, {}, r"'model.layers.1.mlp': its 5 experts cannot be spread evenly over autoep_size = 2 ranks"),
    ],
    ids=["ranks", "all faults", "experts", "number"],
)
def test_what_cannot_run_is_refused(two_ranks, change, options, message):
    two_ranks(_refused, change, options, message)


# Sizes that the overlap backend takes, and for each expert several bands of 128 rows of which the last is not full.
WIDE = dict(hidden_size=256, intermediate_size=192, num_local_experts=8, max_position_embeddings=512)
OF_GPT_OSS = dict(hidden_size=2880, intermediate_size=2880, num_local_experts=4)
LENGTH, BF16_STEPS = 257, 4
# Its first steps are signs of gradients unless eps is as large as they are: bf16 would flip those near zero, and a
# gradient of a wrong scale would do no harm.
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
BF16_ADAMW = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
# What bf16 does to a result is as large, not the same, in two ways to compute it. It is therefore measured, as the
# largest distance from float32 of plain transformers in bf16, rounded in ROUNDINGS ways, and a multiple is allowed.
# (Sums that nearly cancel, as gradients of the attention's sinks, are six times as far off in one way as in another.)
# Routes that nearly tie fall otherwise in each way; a few of them move a result by LEAST_NOISE, whether or not they did
# so in the measurement, and those of several steps by the root of their number times as much.
NOISE_FACTOR, LEAST_NOISE, ROUNDINGS = 3.0, 3e-2, 5


def wide_model(device, **sizes):
    """A float32 model of numbers that bf16 has too, weights and buffers: an engine in bf16 begins with the same."""
    # With this seed no gradient of experts or routers is nearly zero and so all noise.
    model = model_of(seed=4, limit=0.5, bias_std=0.2, **{**WIDE, **sizes})
    # The plain loop over experts, not what is fastest on the device.
    model.set_experts_implementation("eager")
    return model.to(device).bfloat16().float()


def misses(got, in_bf16, exact, steps=1):
    """The results further from float32's than bf16 explains: name -> (error, noise).

    Args:
        in_bf16: several results, rounded in different ways.
    """
    errors, found = relative_errors(got, exact), [relative_errors(results, exact) for results in in_bf16]
    noise = {name: max(each[name] for each in found) for name in exact}
    least = LEAST_NOISE * steps**0.5
    return {
        name: (error, noise[name]) for name, error in errors.items() if error > NOISE_FACTOR * max(noise[name], least)
    }


def assert_told_from_nothing(in_bf16, exact, steps=1):
    """What belongs to the MoE blocks would be missed if it were zero."""
    missed = misses({name: torch.zeros_like(value) for name, value in exact.items()}, in_bf16, exact, steps)
    assert not [name for name in exact if ".mlp." in name and name not in missed]


def assert_ran_on(backend, model):
    """Every block's last forward ran on that backend, and on no other in its place."""
    runtimes = [module.tile_overlap for module in model.modules() if isinstance(module, TileGptOssMLP)]
    assert all(runtime.routing is not None for runtime in runtimes)
    assert {runtime.backend for runtime in runtimes} == {backend}


def plain_results(model):
    """The logits of this rank's tokens, and the gradients of what the ranks average."""
    with torch.no_grad():
        logits = model(input_ids=batch(0, length=LENGTH).to(model.device)).logits
    names, parameters = zip(*model.named_parameters())
    return {"logits": logits, **dict(zip(names, torch.autograd.grad(plain_loss(model, 0, LENGTH), parameters)))}


def rounded_otherwise(model, seed):
    """A copy in bf16 of a plain model; with a seed, outputs and gradients of its MoE blocks are off by up to 2**-8."""
    model, generator = copy.deepcopy(model).bfloat16(), torch.Generator().manual_seed(seed)

    def off(value):
        by = (torch.rand(value.shape, generator=generator).to(value.device) - 0.5) * 2**-7
        return (value.float() * (1 + by)).to(value.dtype)

    def forward(block, inputs, outputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(off)
        return (off(outputs[0]), *outputs[1:])

    for block in (module for module in model.modules() if isinstance(module, gpt_oss.GptOssMLP) and seed):
        block.register_forward_hook(forward)
    return model


def results_of(engine, backend):
    """The same of a converted model; past the engine, which keeps gradients differently under each ZeRO stage."""
    model, ids = engine.module, batch(0, length=LENGTH).to(engine.device)
    # An evaluation comes first: what the layers keep of it has to do for training.
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        assert_ran_on(backend, model)
    loss, parameters = model(input_ids=ids, labels=ids).loss, list(model.parameters())
    assert_ran_on(backend, model)
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters)))
    for parameter, gradient in gradients.items():
        gradients[parameter] = gradient.float() / comm.get_world_size()
        # An expert's gradient is of all ranks' tokens already.
        if getattr(parameter, "allreduce", True):
            comm.all_reduce(gradients[parameter])
    return {"logits": logits, **of_parameters(model, gradients.get)}


def without(fault, model):
    """A copy of a plain model whose experts leave something out."""
    model = copy.deepcopy(model)
    for experts in (module for module in model.modules() if isinstance(module, gpt_oss.GptOssExperts)):
        if fault == "limit":
            experts.limit = 7.0
        else:
            experts.get_parameter(fault).data.zero_()
    return model


def _bf16_gradients(device, backends, sizes):
    plain = wide_model(device, **sizes)
    exact = plain_results(plain)
    in_bf16 = [plain_results(rounded_otherwise(plain, seed)) for seed in range(ROUNDINGS)]
    assert_told_from_nothing(in_bf16, exact)
    for fault in ("limit", "gate_up_proj_bias", "down_proj_bias"):
        assert misses(plain_results(without(fault, plain)), in_bf16, exact), f"experts without {fault} would pass"
    for backend in backends:
        engine = engine_of(copy.deepcopy(plain), 2, backend, algorithm=BF16_ADAMW, bf16=True)
        missed = misses(results_of(engine, backend), in_bf16, exact)
        assert not missed, (backend, missed)


K = [{"num_experts_per_tok": k} for k in (2, 4)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sizes", [*K, {**OF_GPT_OSS, **K[0]}], ids=["k2", "k4", "gpt-oss"])
def test_bf16_gradients_are_transformers_on_gpus(two_gpus, sizes):
    two_gpus(_bf16_gradients, "cuda", ("overlap", "sequential"), sizes)


def test_bf16_gradients_are_transformers(two_ranks):
    two_ranks(_bf16_gradients, "cpu", ("sequential", "reference"), K[1])


def plain_training(model, dtype, zero):
    """The ranks' mean losses, and the weights in ``dtype`` after steps that are taken in float32."""
    model, masters, losses = copy.deepcopy(model).to(dtype), list(copy.deepcopy(model).parameters()), []
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    if zero == 0:
        # DeepSpeed's optimizer for bf16 without ZeRO begins with a step of zero gradients, which AdamW counts.
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer.step()
    for step in range(BF16_STEPS):
        loss = plain_loss(model, step, LENGTH)
        for master, gradient in zip(masters, torch.autograd.grad(loss, list(model.parameters()))):
            master.grad = gradient.float()
        optimizer.step()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters):
                parameter.copy_(master)
    return torch.stack(losses), model.state_dict()


def training_of(engine, backend):
    """The same of an engine; the weights on the first rank, ``None`` on the other."""
    losses = []
    for step in range(BF16_STEPS):
        ids = batch(step, length=LENGTH).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        assert_ran_on(backend, engine.module)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).float() / comm.get_world_size()
    comm.all_reduce(losses)
    return losses, hf_state_dict(engine.module)


def _trains_in_bf16(device, backends, zero, sizes):
    plain = wide_model(device, **sizes)
    start = plain.state_dict()

    def results(losses, state):
        """The losses and what has become of each weight."""
        return {"losses": losses, **{name: value.to(device).float() - start[name] for name, value in state.items()}}

    exact, in_bf16 = (results(*plain_training(plain, dtype, zero)) for dtype in (torch.float32, torch.bfloat16))
    assert_told_from_nothing([in_bf16], exact, BF16_STEPS)
    for backend in backends:
        engine = engine_of(copy.deepcopy(plain), 2, backend, zero, BF16_ADAMW, bf16=True)
        losses, state = training_of(engine, backend)
        got = results(losses, state or {})
        assert comm.get_rank() == 1 or got.keys() == exact.keys()
        missed = misses(got, [in_bf16], {name: exact[name] for name in got}, BF16_STEPS)
        assert not missed, (backend, missed)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("sizes", K, ids=["k2", "k4"])
def test_trains_in_bf16_as_transformers_on_gpus(two_gpus, sizes, zero):
    two_gpus(_trains_in_bf16, "cuda", ("overlap", "sequential"), zero, sizes)


@pytest.mark.parametrize("zero", [0, 1])
def test_trains_in_bf16_as_transformers(two_ranks, zero):
    two_ranks(_trains_in_bf16, "cpu", ("sequential",), zero, K[1])
