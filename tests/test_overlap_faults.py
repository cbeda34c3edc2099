"""The overlap backend where something goes wrong around its kernels: memory, errors between stages, unlike ranks."""

import time
from types import SimpleNamespace

import pytest
import torch
from emulated_ranks import GROUPS, E, H, ThreadPools, layer_of
from models import Gated, fill, stock, tokens

from ds_tileoverlap import buffer, engine, overlap_group
from ds_tileoverlap.exchange import PeerError, peers_of


@pytest.fixture
def layers(emulated, monkeypatch):
    """``layers(k, timeout_s)``: two ranks as threads, and a layer for each."""
    monkeypatch.setattr(overlap_group, "group_of", lambda *_: GROUPS.by_thread())

    def make(k, timeout_s=20.0):
        full = fill(stock(Gated(H, 40), num_experts=E, hidden=H, k=k), std=0.1).bfloat16()
        pools = ThreadPools(2, emulated, timeout_s)
        return pools, [layer_of(rank, pools.peers[rank], full, {}, True) for rank in range(2)]

    return make


def _on_views(rank, group, peers, layers):
    """Outputs and gradients of the same tokens, in memory that begins at a multiple of 16 bytes and in other memory."""
    GROUPS.local.group, layer, found = group, layers[rank], []
    for first in (0, 1):
        places = torch.empty(2, 3000 * H + 8, dtype=torch.bfloat16)
        x, grad = (place[first : first + 3000 * H].view(3000, H) for place in places)
        assert (x.data_ptr() % 16 == 0) == (grad.data_ptr() % 16 == 0) == (first == 0)
        x.copy_(tokens(rank, 3000, hidden=H, dtype=torch.bfloat16))
        grad.copy_(tokens(rank + 5, 3000, hidden=H, dtype=torch.bfloat16))
        y = layer(x.requires_grad_())[0]
        found.append((y.detach(), *torch.autograd.grad(y, x, grad)))
    return all(map(torch.equal, *found))


def test_tokens_that_begin_anywhere(layers):
    """With one expert a token, hidden rows take no more memory than tokens: a copy given up too soon is overwritten."""
    pools, layers = layers(k=1)
    assert pools.run(_on_views, layers) == [True, True]


def _caught(rank, group, peers, layers):
    GROUPS.local.group, layer = group, layers[rank]

    def fails():
        raise MemoryError("CUDA out of memory")

    with torch.no_grad():
        expected = layer(x := tokens(rank, 40, hidden=H, dtype=torch.bfloat16))[0]
        with pytest.raises(MemoryError), layer.deepspeed_moe.tile_overlap.meanwhile(fails):
            layer(tokens(rank, 64, hidden=H, dtype=torch.bfloat16))
        found = layer(x)[0]
    overlap_group.check_failure(group.pool.failure, peers)
    return torch.equal(found, expected)


def test_an_error_that_all_ranks_catch_while_counts_travel(layers):
    """As where a job tries smaller and smaller batches until one fits."""
    pools, layers = layers(k=2)
    assert pools.run(_caught, layers) == [True, True]


def _grown(rank, group, peers):
    tokens, allocate = group.pool.tokens, group.pool.allocate

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    tokens.reserve(1 << 20, 1 << 20)
    group.pool.allocate = no_memory
    with pytest.raises(torch.OutOfMemoryError):
        tokens.reserve(1 << 24, 1 << 24)
    group.pool.allocate = allocate
    tokens.reserve(1 << 20, 1 << 20)
    return tokens.capacity_bytes, tokens._buffer.numel()


def test_growth_after_one_that_failed(emulated):
    assert ThreadPools(2, emulated).run(_grown) == [(1 << 21, 1 << 22)] * 2


def _late(rank, group, peers, layers):
    GROUPS.local.group, layer = group, layers[rank]
    x = tokens(rank, 300, hidden=H, dtype=torch.bfloat16).requires_grad_()
    layer(x)[0].float().sum().backward()
    y = layer(x)[0]
    if rank == 1:
        time.sleep(4.0)
        return None
    y.float().sum().backward()
    overlap_group._GROUPS[None] = group
    try:
        engine.TileEngine().save_checkpoint("nowhere")
    except PeerError as error:
        return str(error)
    finally:
        del overlap_group._GROUPS[None]


def test_nothing_is_saved_after_a_backward_that_gave_up(layers):
    """The rank that is late never comes; the next forward would say so, but a job may save before it, or end."""
    pools, layers = layers(k=2, timeout_s=1.5)
    assert "did not begin the same exchange within 2 s" in pools.run(_late, layers)[0]


def _no_room(rank_without):
    peers = peers_of(torch.distributed.group.WORLD, torch.device("cpu"), None, "test")
    pool = SimpleNamespace(peers=peers, device=torch.device("cpu"), _all=None)
    pool._all = lambda well: buffer.Pool._all(pool, well)

    def part(count, dtype):
        if peers.rank == rank_without:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(count, dtype=dtype)

    pool._part = part
    with pytest.raises(torch.OutOfMemoryError) as error:
        buffer.Pool.allocate(pool, 2**20, torch.int32)
    return str(error.value)


def test_no_rank_waits_for_memory_that_another_does_not_get(two_ranks):
    found = two_ranks(_no_room, 1)
    assert found[0] == "no symmetric memory of 4 MiB: other ranks of the expert-parallel group have none"
    assert found[1] == "no symmetric memory of 4 MiB: CUDA driver error: out of memory"


def test_memory_that_torch_keeps_is_given_back_first(monkeypatch):
    asked = []

    def empty(count, dtype, device):
        asked.append(count)
        if len(asked) == 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(count, dtype=dtype)

    monkeypatch.setattr(buffer.symmetric_memory, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("given back"))
    assert len(buffer.Pool._part(SimpleNamespace(device=None), 3, torch.int32)) == 3
    assert asked == [3, "given back", 3]


def _examined(rank_that_fails, what):
    peers = peers_of(torch.distributed.group.WORLD, torch.device("cpu"), None, "test")
    here = peers.rank == rank_that_fails
    patched = pytest.MonkeyPatch()

    def pool(*_):
        if here and what == "pool":
            raise RuntimeError("pidfd_getfd: Operation not permitted")

    from ds_tileoverlap.op_builder.tileoverlap import TileOverlapBuilder

    patched.setattr(overlap_group, "_refusal", lambda device: None)
    patched.setattr(overlap_group, "_no_peer_access", lambda _: "no access" if here and what == "access" else None)
    patched.setattr(overlap_group.socket, "gethostname", lambda: "host")
    patched.setattr(overlap_group, "_gathered", lambda ours, *_: ([(None, "host", str(i)) for i in range(2)], None))
    patched.setattr(TileOverlapBuilder, "refusal", lambda self: None)
    patched.setattr(TileOverlapBuilder, "load", lambda self: SimpleNamespace(MAX_PEERS=128))
    patched.setattr(overlap_group, "Pool", pool)
    patched.setattr(overlap_group, "_load_kernels", lambda *_: None)
    try:
        group = overlap_group._examine(peers, torch.device("cpu"), "auto")
    finally:
        patched.undo()
    return group.op, group.pool, group.reason


@pytest.mark.parametrize(
    "what,reason",
    [
        ("pool", "symmetric memory could not be made: pidfd_getfd: Operation not permitted (rank 1)"),
        ("access", "no access (rank 1)"),
    ],
)
def test_all_ranks_are_sequential_where_one_cannot_reach_the_others(two_ranks, what, reason):
    assert two_ranks(_examined, 1, what) == [(None, None, reason)] * 2


def test_a_use_on_another_stream_follows_those_before(monkeypatch):
    """On streams that only write down what they are told."""
    done, current = [], [None]

    def stream(name):
        return SimpleNamespace(wait_event=lambda event: done.append(f"{name} waits"), cuda_stream=name)

    first, second = stream(1), stream(2)
    signals = SimpleNamespace(record_stream=lambda stream: done.append(f"signals stay for {stream.cuda_stream}"))
    event = SimpleNamespace(record=lambda stream: done.append(f"recorded on {stream.cuda_stream}"))
    pool = SimpleNamespace(device=torch.device("cuda", 0), signals=signals, _order=event)
    pool._raw_stream = pool._last_stream = None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0].cuda_stream == 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    for current[0] in (first, first, second, stream(3), second, first):
        buffer.Pool.follow(pool, current[0].cuda_stream)
    assert done == [
        *("recorded on 1", "2 waits", "signals stay for 2"),
        *("recorded on 2", "1 waits", "signals stay for 1"),
    ]
