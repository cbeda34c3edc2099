"""C32: every form of expert module equals DeepSpeed's layer, whether it runs grouped or as it is."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.experts import Experts
from deepspeed.profiling.flops_profiler import FlopsProfiler
from models import (
    TOP_K,
    E,
    Gated,
    H,
    I,
    T,
    assert_close,
    backward_of,
    both,
    experts_of,
    fill,
    is_grouped,
    mlp,
    tanh_mlp,
    tokens,
)
from torch import nn

BACKENDS = ("sequential", "reference")


class Swapped(nn.Module):
    """SwiGLU with the names and the order that a model may choose."""

    def __init__(self, reversed_product):
        super().__init__()
        self.w2 = nn.Linear(I, H)
        self.w3 = nn.Linear(H, I)
        self.w1 = nn.Linear(H, I)
        self.act = nn.SiLU()
        self.reversed_product = reversed_product

    def forward(self, x):
        gate, up = self.act(self.w1(x)), self.w3(x)
        return self.w2(up * gate if self.reversed_product else gate.mul(up))


class WithBias(nn.Module):
    """A Megatron-like expert: output and bias."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh")), None


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(H, H)

    def forward(self, x):
        return self.map(F.gelu(self.map(x)))


class Doubled(Gated):
    def forward(self, x):
        return 2 * super().forward(x)


class Branching(nn.Module):
    """Its forward depends on values, so it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x):
        return self.mlp(x) if x.sum() > -1e9 else x


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


def _reweighted():
    expert = mlp()
    nn.utils.parametrizations.weight_norm(expert[0])
    return expert


GROUPED = {
    "no bias": lambda: mlp(bias=False),
    "bias": mlp,
    "one bias": lambda: nn.Sequential(nn.Linear(H, I, bias=False), nn.ReLU(), nn.Linear(I, H)),
    "gated": Gated,
    "gated bias": lambda: Gated(bias=True),
    "w1 w3 w2": lambda: Swapped(False),
    "product reversed": lambda: Swapped(True),
    "tuple": WithBias,
}
AS_THEY_ARE = {
    "dropout": lambda: nn.Sequential(*mlp(), nn.Dropout(0.0)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(H), *mlp()),
    "shared": Shared,
    "overridden forward": Doubled,
    "unknown activation": tanh_mlp,
    "leaky": lambda: mlp(act=lambda: nn.LeakyReLU(0.3)),
    "untraceable": Branching,
    "own linear": lambda: nn.Sequential(ScaledLinear(H, I), nn.GELU(), nn.Linear(I, H)),
    "parametrized": _reweighted,
    "one map": lambda: nn.Linear(H, H),
    "activation last": lambda: nn.Sequential(*mlp(), nn.ReLU()),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", [*GROUPED, *AS_THEY_ARE])
def test_c32_expert_forms(form, residual):
    expert = {**GROUPED, **AS_THEY_ARE}[form]()
    mine, layer = both(expert, use_residual=residual)
    assert is_grouped(mine) == (form in GROUPED)
    x, grad = tokens(1, 3, 11), tokens(2, 3, 11)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


def test_c32_dropout_in_eval():
    mine, layer = both(nn.Sequential(*mlp(), nn.Dropout(0.5)))
    x = tokens(1, T)
    torch.testing.assert_close(mine.eval()(x)[0], layer.eval()(x)[0])


def test_c32_experts_that_differ():
    mine, layer = both(mlp)
    for model in (mine, layer):
        experts_of(model)[3][1] = nn.Tanh()
        experts_of(model)[5] = experts_of(model)[4]
    assert not is_grouped(mine)
    x, grad = tokens(1, T), tokens(2, T)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


def test_c32_tied_experts():
    mine, layer = both(mlp)
    for model in (mine, layer):
        experts_of(model)[5][0].weight = experts_of(model)[4][0].weight
        experts_of(model)[7] = experts_of(model)[6]
    x, grad = tokens(1, T), tokens(2, T)
    for _ in range(2):
        assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


@pytest.mark.parametrize("expert", [mlp, Gated])
def test_c32_hooks_fire(expert):
    mine, layer = both(expert)
    x, grad = tokens(1, T), tokens(2, T)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))
    calls = {id(mine): [], id(layer): []}
    handles = []
    for model in (mine, layer):
        linear = next(m for m in experts_of(model)[2].modules() if isinstance(m, nn.Linear))
        seen = calls[id(model)]
        handles.append(linear.register_forward_hook(lambda m, i, o, seen=seen: seen.append("forward") or 3 * o))
        handles.append(
            linear.register_full_backward_hook(lambda m, i, o, seen=seen: seen.append("backward") or (i[0] * 0.5,))
        )
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))
    assert calls[id(mine)] == calls[id(layer)] == ["forward", "backward"]
    for handle in handles:
        handle.remove()
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))
    assert len(calls[id(mine)]) == 2


def test_c32_grouped_again_without_hooks():
    mine, _ = both(mlp)
    handle = experts_of(mine)[0][0].register_forward_hook(lambda *_: None)
    assert not is_grouped(mine)
    handle.remove()
    assert is_grouped(mine)


def test_a_hook_around_all_experts_is_said_not_to_run(capsys):
    mine, layer = both(mlp)
    seen = []
    mine.deepspeed_moe.experts.register_forward_hook(lambda *_: seen.append(1))
    x, grad = tokens(1, T), tokens(2, T)
    for _ in range(2):
        assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))
    said = [line for line in capsys.readouterr().out.splitlines() if "hook that does not run" in line]
    assert not seen and len(said) == 1 and "deepspeed_moe.experts'" in said[0] and "deepspeed_experts[i]" in said[0]


def _own_forward(experts):
    experts.forward = lambda x: x


class _OwnExperts(Experts):
    def forward(self, x):
        return x


def _own_class(experts):
    experts.__class__ = _OwnExperts


@pytest.mark.parametrize("change", [_own_forward, _own_class])
def test_a_forward_around_all_experts_is_refused(change):
    mine, _ = both(mlp)
    x = tokens(1, T)
    mine(x)
    change(mine.deepspeed_moe.experts)
    with pytest.raises(
        RuntimeError, match=r"deepspeed_moe\.experts', which has a forward of its own: put it on the exp"
    ):
        mine(x)


def test_the_flops_profiler_may_watch_every_module(capsys):
    mine, layer = both(Gated)
    x, grad = tokens(1, T), tokens(2, T)
    profiler = FlopsProfiler(mine)
    profiler.start_profile()
    got = backward_of(mine, x, grad)
    profiler.stop_profile()
    # The router, and three projections of two choices a token.
    assert profiler.get_total_macs() == T * H * E + 3 * TOP_K * T * H * I
    profiler.end_profile()
    assert_close(got, backward_of(layer, x, grad))
    assert "hook" not in capsys.readouterr().out


def _other_activation(experts):
    experts[1][1] = nn.ReLU()


def _other_option(experts):
    for expert in experts:
        expert[1].approximate = "tanh"


def _other_linear(experts):
    experts[2][0] = ScaledLinear(H, I)
    fill(experts[2][0])


def _other_forward(experts):
    plain = experts[0][2].forward
    experts[0][2].forward = lambda x: -plain(x)


def _other_forward_of_expert(experts):
    plain = experts[0].forward
    experts[0].forward = lambda x: plain(x) + 1


def _pre_hook(experts):
    experts[4].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


def _other_weight(experts):
    experts[6][0].weight = nn.Parameter(experts[6][0].weight.detach() * 2)


def _transposed_weight(experts):
    experts[6][0].weight = nn.Parameter(experts[6][0].weight.detach().t().contiguous().t())


def _no_bias(experts):
    experts[6][0].bias = None


def _narrow_expert(experts):
    experts[6][0].weight = nn.Parameter(experts[6][0].weight.detach()[:32].clone())
    experts[6][0].bias = nn.Parameter(experts[6][0].bias.detach()[:32].clone())
    experts[6][2].weight = nn.Parameter(experts[6][2].weight.detach()[:, :32].clone())


CHANGES = (
    _other_activation,
    _other_option,
    _other_linear,
    _other_forward,
    _other_forward_of_expert,
    _pre_hook,
    _other_weight,
    _transposed_weight,
    _no_bias,
    _narrow_expert,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_c32_form_is_read_at_every_forward(change, backend):
    mine, layer = both(mlp, backend)
    x, grad = tokens(1, T), tokens(2, T)
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))
    change(experts_of(mine))
    change(experts_of(layer))
    assert_close(backward_of(mine, x, grad), backward_of(layer, x, grad))


# Uses of autograd
