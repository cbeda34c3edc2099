"""torch.compile of the model around our layers: each is a graph break, and what is computed stays the same."""

import pytest
import torch
from engines import batch, changes, engine_of, net_of, train, weights_of
from models import assert_close

from ds_tileoverlap.layer import TileMOELayer


def _by_engine(net, backend):
    engine = engine_of(net, backend)
    engine.compile(backend="eager")
    return engine


def _warm(net, backend):
    engine = engine_of(net, backend)
    with torch.no_grad():
        engine(batch(9)[0])
    engine.compile(backend="eager")
    return engine


def _before(net, backend):
    engine = engine_of(torch.compile(net, backend="eager"), backend)
    assert all(type(layer.deepspeed_moe) is TileMOELayer for layer in net.layers)
    return engine


def _same(start, backend, options):
    found = []
    for way in (engine_of, start):
        torch.compiler.reset()
        net = net_of(2, 2, **options)
        before = weights_of(net)
        losses = torch.tensor(train(way(net, backend), range(3)))
        found.append({"losses": losses, **changes(net, before)})
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"drop_tokens": True, "min_capacity": 4}, {"use_residual": True}], ids=["mlp", "drop", "residual"]
)
@pytest.mark.parametrize("start", [_by_engine, _warm, _before])
def test_trains_as_without(two_ranks, start, options):
    two_ranks(_same, start, "sequential", options)
