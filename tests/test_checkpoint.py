"""Checkpoints in both directions between DeepSpeed's layer and ours, and resuming."""

import pytest
import torch
from deepspeed import comm
from deepspeed.utils import groups
from engines import EXPERTS, INNER, STOCK, Net, batch, changes, engine_of, net_of, train, weights_of
from models import assert_close
from torch import nn

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block


def _expert_values(net):
    """Value of each local expert by global id; every element of an expert must be equal."""
    found = {}
    for layer in net.layers:
        rank = groups._get_expert_parallel_rank(layer.expert_group_name)
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            values = torch.cat([p.detach().flatten() for p in expert.parameters()]).unique().tolist()
            assert len(values) == 1
            assert found.setdefault(local + rank * layer.num_local_experts, values[0]) == values[0]
    return found


def _numbered(ep_size, inner=INNER):
    net = net_of(ep_size, 2, inner=inner)
    for layer in net.layers:
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for parameter in expert.parameters():
                nn.init.constant_(parameter, local + (comm.get_rank() % ep_size) * layer.num_local_experts + 1.0)
    return net


def _save_worker(folder, ep_size, backend, zero, inner):
    net = _numbered(ep_size, inner)
    engine = engine_of(net, backend, zero, lr=0.0)
    train(engine, range(1))  # the experts' weights have moved to where the grouped GEMMs want them
    engine.save_checkpoint(folder, tag="saved")
    return sum(p.nbytes for p in net.layers[0].deepspeed_moe.experts.deepspeed_experts[0].parameters())


def _load_worker(folder, ep_size, backend, zero, group_size=10**9):
    """Loads into one step of training, as stock does."""
    found = []
    for kind in (backend, STOCK):
        net = net_of(ep_size, 2)
        engine = engine_of(net, kind, zero, lr=0.1, group_size=group_size)
        train(engine, range(1))
        engine(batch(1)[0])
        engine.load_checkpoint(folder, tag="saved", load_module_only=True)
        rank, count = comm.get_rank() % ep_size, EXPERTS // ep_size
        assert _expert_values(net) == {g: g + 1.0 for g in range(rank * count, (rank + 1) * count)}
        before = weights_of(net)
        train(engine, range(5, 6))
        assert changes(net, before)["head.weight"].any()
        found.append(weights_of(net))
    assert_close(*found)


@pytest.mark.parametrize("group_size", [10**9, 1], ids=["one group", "a group each"])
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("saved,loaded", [(STOCK, "sequential"), (STOCK, "reference"), ("sequential", STOCK)])
def test_c04_checkpoint_across_expert_parallel_sizes(two_ranks, four_ranks, tmp_path, saved, loaded, zero, group_size):
    two_ranks(_save_worker, str(tmp_path), 2, saved, zero, INNER)
    for ep_size in (1, 2):
        two_ranks(_load_worker, str(tmp_path), ep_size, loaded, zero, group_size)
    four_ranks(_load_worker, str(tmp_path), 4, loaded, zero, group_size)


@pytest.mark.parametrize("zero", [0, 1])
def test_c14_expert_files(two_ranks, tmp_path, zero):
    own_bytes, _ = two_ranks(_save_worker, str(tmp_path), 2, "sequential", zero, 1024)
    files = sorted((tmp_path / "saved").glob("layer_*_expert_*_model_states.pt"))
    expected = [f"layer_{layer}_expert_{g}_mp_rank_00_model_states.pt" for layer in range(2) for g in range(EXPERTS)]
    assert [file.name for file in files] == expected
    for file in files:
        assert file.stat().st_size <= 1.1 * own_bytes + 4096
    state = torch.load(files[1], weights_only=False)
    prefix = "layers.0.deepspeed_moe.experts.deepspeed_experts.1"
    assert sorted(state) == [f"{prefix}.{n}" for n in ("0.bias", "0.weight", "2.bias", "2.weight")]
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in state.values())


def _save_16bit_worker(folder, zero, bf16):
    """The head and one rank's first experts are frozen; what ranks hold is frozen or not, rank by rank."""
    net = _numbered(2)
    engine = engine_of(net, "sequential", zero, bf16={"enabled": bf16})
    net.head.requires_grad_(False)
    net.layers[0].deepspeed_moe.experts.deepspeed_experts[0].requires_grad_(comm.get_rank() == 0)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True) is True
    with pytest.raises(RuntimeError, match=r"rank 0 could not save the model to \S+/x: "):
        engine.save_16bit_model(f"{folder}/trained.bin", "x")


@pytest.mark.parametrize("zero,bf16", [(0, False), (2, True)])
def test_save_16bit_model_writes_the_experts_of_all_ranks(two_ranks, tmp_path, zero, bf16):
    two_ranks(_save_16bit_worker, str(tmp_path), zero, bf16)
    state, trained = (torch.load(tmp_path / name, weights_only=True) for name in ("pytorch_model.bin", "trained.bin"))
    Net(1, 2).load_state_dict(state)
    for name, value in state.items():
        if "experts" in name:
            assert value.eq(int(name.split("experts.")[2].split(".")[0]) + 1).all()
    assert {value.dtype for value in state.values()} == {torch.bfloat16 if bf16 else torch.float32}
    frozen = {name for name in state if "head" in name or "layers.0.deepspeed_moe.experts.deepspeed_experts.2." in name}
    assert trained.keys() == state.keys() - frozen


def _resume_worker(folder, zero, saved, resumed):
    options = dict(zero=zero, optimizer="Adam", lr=1e-2)
    net = net_of(2, 2)
    engine = engine_of(net, saved, **options)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="middle")
    losses = train(engine, range(2, 4))

    other = net_of(2, 2)
    engine = engine_of(other, resumed, **options)
    train(engine, range(7, 8))
    assert engine.load_checkpoint(folder, tag="middle")[0] is not None
    assert engine.global_steps == 2
    resumed_losses = train(engine, range(2, 4))
    same = saved == resumed
    assert losses == pytest.approx(resumed_losses, rel=1e-7 if same else 1e-4)
    assert_close(weights_of(other), weights_of(net), 0.0 if same else 1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("saved,resumed", [("sequential", "sequential"), (STOCK, "sequential"), ("sequential", STOCK)])
def test_resume_equals_uninterrupted(two_ranks, tmp_path, zero, saved, resumed):
    two_ranks(_resume_worker, str(tmp_path), zero, saved, resumed)
