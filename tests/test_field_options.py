"""Dtypes, shapes, expert forms, autograd uses and random options as DeepSpeed's layer has them; mostly on one rank."""

import copy

import pytest
import torch
from models import (
    TOP_K,
    E,
    Gated,
    H,
    T,
    assert_close,
    backward_of,
    both,
    experts_of,
    fill,
    mlp,
    ours,
    stock,
    tanh_mlp,
    tokens,
)

from ds_tileoverlap import MoE

BACKENDS = ("sequential", "reference")


# C24: dtypes


def _relative_errors(got, exact):
    return {n: (got[n].double() - exact[n].double()).norm() / exact[n].double().norm() for n in exact if n != "counts"}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("form", [mlp, Gated])
@pytest.mark.parametrize("case", ["bf16", "autocast", "fp32 gate"])
def test_c24_error_in_bf16(case, form, k):
    mine, layer = both(form, k=k)
    x, grad = tokens(1, T, dtype=torch.bfloat16), tokens(2, T, dtype=torch.bfloat16)
    for model in (mine, layer):
        model.to(torch.bfloat16)
        if case == "fp32 gate":
            model.deepspeed_moe.gate.float()
        if case == "autocast":
            model.float()
    dtypes = {name: p.dtype for name, p in layer.named_parameters()}
    exact = backward_of(copy.deepcopy(layer).float(), x.float(), grad.float())
    x = x.float() if case == "autocast" else x
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        got, expected = backward_of(mine, x, grad), backward_of(layer, x, grad)
    assert {n: v.dtype for n, v in got.items()} == {n: v.dtype for n, v in expected.items()}
    assert all(got[name].dtype == dtype for name, dtype in dtypes.items())
    assert torch.equal(got["counts"], expected["counts"]) and got["l_aux"].dtype == torch.float32
    if case != "autocast":
        errors, theirs = _relative_errors(got, exact), _relative_errors(expected, exact)
        assert all(errors[name] <= 2 * theirs[name] + 1e-6 for name in errors), (errors, theirs)
    else:
        assert_close(got, expected, 0.03)


def _wrong_dtype_worker(form, message):
    mine = ours(fill(stock(form(), ep_size=2)).to(torch.bfloat16))
    mine.set_deepspeed_parallelism()
    with pytest.raises(RuntimeError, match=message):
        mine(tokens(0, T))


@pytest.mark.parametrize(
    "form,message",
    [(mlp, "hidden_states: got torch.float32, expected torch.bfloat16"), (tanh_mlp, "(?i)same dtype.*bfloat16")],
)
def test_c24_float_input_to_bf16_model(two_ranks, form, message):
    two_ranks(_wrong_dtype_worker, form, message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c24_autocast_ends_before_backward(backend):
    mine, layer = both(Gated, backend)
    results = []
    for model in (mine, layer):
        x = tokens(1, T).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, l_aux, _ = model(x)
        (y.float().sum() + l_aux).backward()
        results.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}})
    assert_close(*results, 0.03)


# C26: shapes


@pytest.mark.parametrize("num_experts", [5, 6])
@pytest.mark.parametrize("form", [mlp, Gated])
@pytest.mark.parametrize("sizes", [(72, 40), (288, 288)], ids=str)
@pytest.mark.parametrize("drop", [False, True])
def test_c26_awkward_shapes(sizes, form, num_experts, drop):
    layer = fill(stock(form(*sizes), num_experts, hidden=sizes[0], drop_tokens=drop), std=0.1)
    mine = ours(layer)
    for num_tokens in (1, 7, 33):
        x, grad = tokens(1, num_tokens, hidden=sizes[0]), tokens(2, num_tokens, hidden=sizes[0])
        assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad), 2e-5)


def _odd_worker(dtype, k):
    rank = torch.distributed.get_rank()
    layer = fill(stock(mlp(1025, 512), 6, ep_size=2, k=k, hidden=1025), std=0.05, ep_rank=rank).to(dtype)
    mine = ours(layer)
    for model in (mine, layer):
        model.set_deepspeed_parallelism()
    x, grad = (tokens(i + rank, 7, hidden=1025, dtype=dtype) for i in (10, 20))
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad), 2e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c26_odd_width(two_ranks, dtype, k):
    two_ranks(_odd_worker, dtype, k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c30_fp16_range(backend):
    mine, layer = both(mlp, backend, k=3)
    for model in (mine, layer):
        with torch.no_grad():
            for expert in experts_of(model):
                expert[2].bias.fill_(6e4)
                expert[2].weight.mul_(40)
        model.half()
    x = tokens(1, T, dtype=torch.float16) * 30
    (got, _, _), (expected, _, _) = mine(x), layer(x)
    assert expected.isinf().any() and expected.isfinite().any()
    finite = expected.isfinite()
    assert got[finite].isfinite().all() and not got.isnan().any()
    torch.testing.assert_close(got[finite], expected[finite], rtol=3e-3, atol=10.0)


# C32: expert modules


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [mlp, Gated, tanh_mlp()])
@pytest.mark.parametrize("k", [1, 2])
def test_autograd_uses(k, form, backend):
    mine, layer = both(form, backend, k=k)
    results = []
    for model in (mine, layer):
        found = {}

        def keep(name, x, model=model, found=found):
            found.update({f"{name} {n}": p.grad.clone() for n, p in (("x", x), *model.named_parameters())})
            model.zero_grad(set_to_none=True)

        x, other = tokens(1, T).requires_grad_(), tokens(2, 5).requires_grad_()
        y, l_aux, _ = model(x)
        loss = y.square().sum() + l_aux
        loss.backward(retain_graph=True)
        loss.backward()
        keep("retained", x)

        x.grad = None
        y, l_aux, _ = model(x)
        later, later_aux, _ = model(other)
        (y.sin().sum() + later.square().sum() + l_aux + later_aux).backward()
        keep("two forwards", x)

        x.grad = None
        y, l_aux, _ = model(x)
        inputs = [x, *model.parameters()]
        grads = torch.autograd.grad(y.square().sum() + l_aux, inputs, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        keep("twice", x)

        x.grad = None
        y = model(0.2 * model(x)[0])[0]
        grads = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        keep("one layer two times", x)

        with torch.no_grad():
            found["no_grad"] = model(x)[0]
        found["eval"] = model.eval()(x)[0].detach()
        results.append(found)
    assert_close(*results, 2e-4)


def _double_backward_worker(form, backend):
    rank = torch.distributed.get_rank()
    layer = fill(stock(form(), ep_size=2), ep_rank=rank)
    mine, results = ours(layer, backend), []
    for model in (mine, layer):
        model.set_deepspeed_parallelism()
        x = tokens(rank, T).requires_grad_()
        y, l_aux, _ = model(x)
        (grad_x,) = torch.autograd.grad(y.square().sum() + l_aux, x, create_graph=True)
        grad_x.square().sum().backward()
        results.append({"x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert_close(*results, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [mlp, Gated])
def test_double_backward_on_two_ranks(two_ranks, form, backend):
    two_ranks(_double_backward_worker, form, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_before_training(backend):
    mine, layer = both(mlp, backend)
    x, grad = tokens(1, T), tokens(2, T)
    with torch.inference_mode():
        torch.testing.assert_close(mine(x)[0], layer(x)[0])
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


INPUTS = {
    "2-D": lambda: tokens(1, 12),
    "3-D": lambda: tokens(1, 3, 4),
    "4-D": lambda: tokens(1, 3, 2, 2),
    "transposed": lambda: tokens(1, 3, 4).transpose(0, 1),
    "columns": lambda: tokens(1, 12, hidden=2 * H)[:, ::2],
    "rows": lambda: tokens(1, 24)[::2],
    "expanded": lambda: tokens(1, 1, 4).expand(3, 4, H),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", INPUTS)
def test_input_shapes(shape, backend):
    mine, layer = both(mlp, backend)
    results = []
    for model in (mine, layer):
        model.zero_grad()
        x = INPUTS[shape]()
        shift = torch.zeros((), requires_grad=True)
        y, l_aux, counts = model(x.requires_grad_() if x.is_leaf else x + shift * 0)
        assert y.shape == x.shape
        (y.square().sum() + l_aux).backward()
        y, l_aux, counts = model(INPUTS[shape]())
        grads = {n: p.grad for n, p in model.named_parameters()}
        results.append({"y": y.detach(), "l_aux": l_aux.detach(), "counts": counts, **grads})
    assert_close(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_nan_stays_in_its_row(k, drop, backend):
    mine, layer = both(mlp, backend, k=k, drop_tokens=drop, capacity_factor=8.0)
    x = tokens(1, T)
    clean = mine(x)[0]
    x[5] = float("nan")
    y, _, counts = mine(x)
    others = torch.arange(T) != 5
    assert y[5].isnan().all()
    torch.testing.assert_close(y[others], clean[others])
    assert torch.equal(counts, layer(x)[2])


# Random and masked routing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop", [False, True])
def test_used_token(drop, backend):
    mine, layer = both(mlp, backend, k=1, drop_tokens=drop)
    x, grad = tokens(1, T), tokens(2, T)
    used = (torch.arange(T) % 3 > 0).long()
    got, expected = backward_of(mine, x, grad, used_token=used), backward_of(layer, x, grad, used_token=used)
    assert_close(got, expected)
    assert got["counts"].sum() == used.sum() and not got["y"][used == 0].any()


RANDOM = {
    "jitter": dict(k=1, noisy_gate_policy="Jitter"),
    "jitter 2": dict(k=2, noisy_gate_policy="Jitter"),
    "jitter 3": dict(k=3, noisy_gate_policy="Jitter"),
    "rsample": dict(k=1, noisy_gate_policy="RSample"),
    "rsample rts": dict(k=1, noisy_gate_policy="RSample", use_rts=True),
    "rts": dict(k=1, use_rts=True),
    "rsample 2": dict(k=2, noisy_gate_policy="RSample"),
    "second": dict(k=2, top2_2nd_expert_sampling=True),
    "second jitter": dict(k=2, top2_2nd_expert_sampling=True, noisy_gate_policy="Jitter"),
    "unused": dict(k=3, top2_2nd_expert_sampling=True, use_rts=True),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("drop", [False, True], ids=["dropless", "drop"])
@pytest.mark.parametrize("case", RANDOM)
def test_random_options(case, drop, training):
    mine, layer = both(mlp, drop_tokens=drop, capacity_factor=0.7, **RANDOM[case])
    x, grad, results = tokens(1, 500), tokens(2, 500), []
    for model in (mine, layer):
        model.train(training)
        torch.manual_seed(11)
        results.append({**backward_of(model, x, grad), "generator": torch.get_rng_state()})
    assert_close(*results, 2e-5)


def test_argument_errors():
    with pytest.raises(ValueError) as error:
        MoE(0, mlp(), E, k=0)
    assert "hidden_size: got 0" in str(error.value) and "k: got 0" in str(error.value)
    with pytest.raises(ValueError, match=f"k: got {E + 1}, expected an integer from 1 to num_experts = {E}"):
        MoE(H, mlp(), E, k=E + 1)
    assert MoE(H, mlp(), E, k=TOP_K).deepspeed_moe.gate.k == TOP_K


@pytest.mark.parametrize("change", [lambda p: p.add_(1.0), lambda p: setattr(p, "data", p.data.clone())])
def test_parameter_changed_before_backward(change):
    mine, _ = both(Gated)
    y = mine(tokens(1, T))[0]
    with torch.no_grad():
        change(experts_of(mine)[3].up_proj.weight)
    with pytest.raises(RuntimeError, match="changed or moved after the forward"):
        y.sum().backward()
