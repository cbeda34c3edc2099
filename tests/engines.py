"""A small model under DeepSpeed's engine, and what tests compare of it."""

import deepspeed
import torch
from deepspeed import comm
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from models import PLAIN, assert_close, fill, mlp, tokens
from torch import nn

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block
from ds_tileoverlap.layer import TileMOELayer

BACKENDS = ("sequential", "reference")
STOCK = None
HIDDEN, INNER, EXPERTS, TOKENS = 16, 24, 4, 12


class Net(nn.Module):
    """MoE layers with skip connections and a head; ``recompute`` checkpoints each layer."""

    def __init__(self, ep_size, layers=1, form=mlp, hidden=HIDDEN, inner=INNER, **options):
        super().__init__()
        kinds = {**PLAIN, "k": 2, **options}
        self.layers = nn.ModuleList(
            StockMoE(hidden, form(hidden, inner), EXPERTS, ep_size, **kinds) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, hidden)
        self.num_local_experts = EXPERTS // ep_size
        self.recompute = None

    def forward(self, x):
        losses = 0.0
        for layer in self.layers:
            y, l_aux, _ = layer(x) if self.recompute is None else self.recompute(layer, x)
            x, losses = x + y, losses + l_aux
        return self.head(x), losses


def net_of(ep_size, layers=1, **options):
    """A net whose values do not depend on ``ep_size``, on ranks whose groups are neighbours."""
    return fill(Net(ep_size, layers, **options), ep_rank=comm.get_rank() % ep_size)


def engine_of(net, backend, zero=0, lr=0.5, optimizer="SGD", group_size=10**9, **config):
    """An engine for ``net``, on a backend of the package or, for :data:`STOCK`, without it."""
    options = {"torch_adam": True} if optimizer == "Adam" else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": lr, **options}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it is 1.0 by default, which hides a wrong scale
        "steps_per_print": 10**9,
        "tile_overlap": {"enabled": backend is not STOCK, **({"backend": backend} if backend else {})},
        **config,
    }
    config["zero_optimization"] = {"stage": zero, **config.get("zero_optimization", {})}
    trained = {"params": [*net.parameters()], "name": "all"}
    trained = split_params_into_different_moe_groups_for_optimizer(trained, group_size)
    trained = [group for group in trained if group["params"]]
    engine = deepspeed.initialize(model=net, model_parameters=trained, config=config)[0]
    inner = {type(layer.deepspeed_moe) is TileMOELayer for layer in net.layers}
    assert inner == {backend is not STOCK}
    return engine


def loss_of(output, seed):
    y, l_aux = output
    return (y.float() * tokens(seed, *y.shape[:-1], hidden=y.shape[-1])).sum() / 20 + 0.1 * l_aux


def batch(step, rank=None, length=TOKENS):
    """A step's tokens on a rank, and the seed of their loss."""
    seed = 1000 * step + 10 * (comm.get_rank() if rank is None else rank)
    return tokens(seed, length, hidden=HIDDEN), seed + 1


def train(engine, steps, dtype=torch.float32):
    """Optimizer steps of one micro-batch each; returns the losses."""
    losses = []
    for step in steps:
        x, seed = batch(step)
        loss = loss_of(engine(x.to(dtype)), seed)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(net):
    return {name: p.detach().float().clone() for name, p in net.named_parameters()}


def changes(net, before):
    return {name: value - before[name] for name, value in weights_of(net).items()}


def assert_same_training(build, steps=3, rtol=2e-5, dtype=torch.float32, **options):
    """Weights change as with stock layers on every backend, and all of them that require gradients do change."""
    found = {}
    for backend in (STOCK, *BACKENDS):
        net = build()
        before = weights_of(net)
        train(engine_of(net, backend, **options), range(steps), dtype)
        found[backend] = changes(net, before)
        assert all(found[backend][name].any() == p.requires_grad for name, p in net.named_parameters())
    for backend in BACKENDS:
        assert_close(found[backend], found[STOCK], rtol)
