"""GPT-OSS on our stages: computes and trains as plain transformers, is saved, loaded, and goes back to its names."""

import copy

import deepspeed
import pytest
import torch
from deepspeed import comm
from torch import nn

from ds_tileoverlap import gpt_oss
from ds_tileoverlap.gpt_oss import TileGptOssMLP, all_experts, hf_state_dict

transformers = pytest.importorskip("transformers")

STEPS, LR = 10, 0.1
# So small that gates and ups of these models are clamped.
LIMIT = 0.05


def model_of(seed=0):
    """A tiny GPT-OSS, the same on every call and rank, whose biases are not zero."""
    config = transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=32, intermediate_size=24,
        vocab_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.GptOssForCausalLM(config).float()
    for module in model.modules():
        if isinstance(module, gpt_oss.GptOssExperts):
            module.limit = LIMIT
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


SGD = {"type": "SGD", "params": {"lr": LR}}
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}


def engine_of(model, ep_size, backend="auto", zero=0, algorithm=SGD, **options):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": algorithm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.0,
        "expert_parallel": {"enabled": True, "autoep_size": ep_size},
        "steps_per_print": 10**9,
        "tile_overlap": {"enabled": True, "backend": backend},
    }
    engine = deepspeed.initialize(model=model, config=config, **options)[0]
    assert sum(isinstance(module, TileGptOssMLP) for module in engine.module.modules()) == 2
    return engine


def batch(step, rank=None):
    rank = comm.get_rank() if rank is None else rank
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def plain_loss(model, step):
    """What the engine's ranks average."""
    ids = [batch(step, rank) for rank in range(comm.get_world_size())]
    return sum(model(input_ids=i, labels=i).loss for i in ids) / len(ids)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        assert (got[name] - value).abs().max() <= 2e-6 + 1e-4 * value.abs().max(), name


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
    got = {name: p.grad for name, p in engine.module.named_parameters() if "deepspeed_moe" not in name}
    for name, module in engine.module.named_modules():
        if isinstance(module, TileGptOssMLP):
            found = all_experts(module, of=lambda p: p.grad)
            got |= {f"{name}.experts.{key}": value for key, value in found.items()}
    assert_same(got, gradients)
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
