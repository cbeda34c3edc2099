"""``engine.load_checkpoint`` of broken checkpoints: every rank names the fault, and the model keeps its weights."""

import re
import shutil
from functools import partial
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from engines import engine_of, net_of, train, weights_of
from models import assert_close

from ds_tileoverlap.load_check import LoadError
from ds_tileoverlap.model_experts import checksum

pytest.importorskip("transformers")
import hf_engines  # noqa: E402
from checkpoint_folders import EXPERT, MODEL, change, content_of, edit_of, poisoned, truncate  # noqa: E402
from hf_models import model_of  # noqa: E402

ADAM = {"optimizer": "Adam", "lr": 1e-2}
OPTIMIZER = "expp_rank_1_mp_rank_00_optim_states.pt"


def native_engine(zero=0, ep_size=2):
    return engine_of(net_of(ep_size, 2), "sequential", zero, **ADAM)


def autoep_engine(zero=0):
    return hf_engines.engine_of(model_of("mixtral")[1], zero=zero)


def _edit(number, tensor, edit):
    """A change to one tensor of an expert of layer 1, by its name in the native model or in the AutoEP one."""

    def apply(folder):
        file = folder / EXPERT.format(1, number)
        names = torch.load(file, weights_only=False)
        change(file, edit_of(next(part for part in tensor if any(part in name for name in names)), edit))

    return apply


def _more(state):
    state["more.deepspeed_moe.experts.deepspeed_experts.3.bias"] = torch.zeros(1)


def _first_matrix(state):
    return next(value for value in state.values() if value.dim() > 1)


DOWN = (".2.weight", ".w2.")
# Name -> (what is done to a sound checkpoint, what has to be said of it).
DAMAGES = {
    "missing": (lambda d: (d / EXPERT.format(1, 3)).unlink(), r"layer_1_expert_3_\S+: missing \(layer '\S+1\S*'\)"),
    "extra expert": (
        lambda d: shutil.copy(d / EXPERT.format(1, 3), d / EXPERT.format(1, 4)),
        r"layer_1_expert_4_\S+: extra, expected experts 0 to 3",
    ),
    "extra layer": (
        lambda d: shutil.copy(d / EXPERT.format(1, 3), d / EXPERT.format(2, 0)),
        r"layer_2_expert_0_\S+: extra, expected 2 MoE layers",
    ),
    # DeepSpeed itself loads expert 1 as expert 3 then: both are the second one of their rank.
    "other expert": (
        lambda d: shutil.copy(d / EXPERT.format(1, 1), d / EXPERT.format(1, 3)),
        r"layer_1_expert_3_\S+: \S+experts\.(w2\.)?1\S*: extra, expected \S+experts\.(w1\.)?3",
    ),
    "missing tensor": (_edit(2, DOWN, lambda v: None), r"layer_1_expert_2_\S+: \S+: missing, expected shape \[\d+, "),
    "extra tensor": (lambda d: change(d / EXPERT.format(1, 3), _more), r"layer_1_expert_3_\S+: more\S+: extra"),
    "shape": (_edit(2, DOWN, lambda v: v[:, :20].clone()), r"layer_1_expert_2_\S+: \S+: got shape \[\d+, 20\], exp"),
    "dtype": (
        _edit(2, DOWN, torch.Tensor.bfloat16),
        r"layer_1_expert_2_\S+: \S+: got torch.bfloat16, expected torch.float32 as in other experts",
    ),
    "nan": (_edit(2, DOWN, poisoned(float("nan"))), r"layer_1_expert_2_\S+: \S+: got 1 NaN or inf"),
    "inf elsewhere": (
        lambda d: change(d / MODEL, lambda s: _first_matrix(s["module"])[0, 0].fill_(float("inf"))),
        r"/mp_rank_00_\S+: \S+: got 1 NaN or inf",
    ),
    "truncated": (lambda d: truncate(d / EXPERT.format(0, 2)), r"layer_0_expert_2_\S+: cannot be read, it may be"),
    "empty": (lambda d: (d / EXPERT.format(0, 2)).write_bytes(b""), r"layer_0_expert_2_\S+: cannot be read, it may be"),
    "truncated model": (lambda d: truncate(d / MODEL), r"/mp_rank_00_\S+: cannot be read, it may be truncated"),
    "no model": (lambda d: (d / MODEL).unlink(), r"/mp_rank_00_\S+: missing"),
    "truncated optimizer": (lambda d: truncate(d / OPTIMIZER), r"expp_rank_1_\S+: cannot be read.*load_module_only"),
    "ep_size": (lambda d: (d / OPTIMIZER).unlink(), r"got optimizer state of ep_size 1, expected 2 \(weights alone"),
}  # fmt: skip


def _train(engine, steps):
    (train if hasattr(engine.module, "head") else hf_engines.train)(engine, steps)


def _save(folder, build):
    """A checkpoint after each of two steps."""
    engine = build()
    for step in range(2):
        _train(engine, range(step, step + 1))
        engine.save_checkpoint(folder, tag=f"step{step}")


def _load_all(root, build):
    """Loads every damaged checkpoint, and then the sound one, into one engine."""
    engine = build()
    before = weights_of(engine.module)
    for name, (_, message) in DAMAGES.items():
        with pytest.raises(LoadError, match="cannot be loaded; nothing was:") as error:
            engine.load_checkpoint(f"{root}/{name}", tag="step0")
        assert re.search(message, str(error.value)), (name, str(error.value))
        assert_close(weights_of(engine.module), before, 0.0)
    assert engine.load_checkpoint(f"{root}/sound", tag="step0")[0] is not None
    assert any((value != before[name]).any() for name, value in weights_of(engine.module).items())


@pytest.mark.parametrize("build", [native_engine, autoep_engine])
def test_damage_is_named_on_every_rank(two_ranks, tmp_path, build):
    two_ranks(_save, str(tmp_path / "sound"), build)
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(tmp_path / "sound", tmp_path / name)
        damage(tmp_path / name / "step0")
    before = content_of(tmp_path)
    two_ranks(_load_all, str(tmp_path), build)
    assert content_of(tmp_path) == before


def _load(folder, build, message, own_folder=False, tag="step0"):
    engine = build()
    with pytest.raises(LoadError) as error:
        engine.load_checkpoint(f"{folder}/{comm.get_rank()}" if own_folder else folder, tag=tag)
    assert re.search(message, str(error.value)), str(error.value)


def test_ranks_that_hold_an_expert_have_to_read_the_same(two_ranks, tmp_path):
    """As where each machine has its own copy of a checkpoint, one of them an older one."""
    build = partial(native_engine, ep_size=1)
    two_ranks(_save, str(tmp_path / "0"), build)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    name = EXPERT.format(1, 2)
    shutil.copy(tmp_path / "1" / "step1" / name, tmp_path / "1" / "step0" / name)
    differs = r"1', expert 2: ranks that hold it differ, got checksums 0x\w{16} on ranks \[0\], 0x\w{16} on ranks \[1\]"
    two_ranks(_load, str(tmp_path), build, "'layers." + differs, True)
    shutil.rmtree(tmp_path / "1" / "step0")
    two_ranks(_load, str(tmp_path), build, r"ranks \[1\]: no such folder, which other ranks have", True)


def _load_unknown(folder):
    engine = native_engine()
    assert engine.load_checkpoint(folder) == (None, None), "no tag, no 'latest'"
    engine.save_checkpoint(folder, tag="step0")
    engine.save_checkpoint(folder, tag="step1")
    for where, tags in ((folder, "step0, step1"), (f"{folder}/none", "none")):
        with pytest.raises(LoadError, match=f"there is no tag 'zz'; tags that are there: {tags}$"):
            engine.load_checkpoint(where, tag="zz")


def test_a_tag_that_is_not_there(two_ranks, tmp_path):
    two_ranks(_load_unknown, str(tmp_path))


def _swaps(folder, build, tensor):
    """A loader that puts one expert of rank 1 where another one belongs."""
    load = DeepSpeedEngine.load_moe_state_dict

    def swapped(*args, **kwargs):
        load(*args, **kwargs)
        if comm.get_rank() == 1:
            tensor(kwargs["state_dict"])

    with patch.object(DeepSpeedEngine, "load_moe_state_dict", staticmethod(swapped)):
        _load(folder, build, r"  rank 1: layer '\S+1\S*', expert 2: got checksum 0x\w{16}, its file has 0x\w{16}")


def _native_swap(state):
    first, second = (f"layers.1.deepspeed_moe.experts.deepspeed_experts.{i}.0.weight" for i in range(2))
    state[first], state[second] = state[second], state[first]


def _autoep_swap(state):
    state["model.layers.1.mlp.experts.w1"] = state["model.layers.1.mlp.experts.w1"].flip(0)


@pytest.mark.parametrize("build,tensor", [(native_engine, _native_swap), (autoep_engine, _autoep_swap)])
def test_experts_have_to_be_those_of_their_files(two_ranks, tmp_path, build, tensor):
    two_ranks(_save, str(tmp_path), build)
    two_ranks(_swaps, str(tmp_path), build, tensor)


def _fails_on_one(folder):
    engine, load = native_engine(), DeepSpeedEngine._load_checkpoint

    def fails(*args, **kwargs):
        if comm.get_rank() == 1:
            raise OSError("stale file handle")
        return load(*args, **kwargs)

    with patch.object(DeepSpeedEngine, "_load_checkpoint", fails):
        with pytest.raises((LoadError, OSError)) as error:
            engine.load_checkpoint(folder, tag="step0")
    assert error.type is (LoadError if comm.get_rank() == 0 else OSError)
    assert "stale file handle" in str(error.value)


def test_a_rank_that_fails_stops_all(two_ranks, tmp_path):
    two_ranks(_save, str(tmp_path), native_engine)
    two_ranks(_fails_on_one, str(tmp_path))


@pytest.mark.parametrize("zero", [1, 2])
def test_zeros_own_copies(two_ranks, tmp_path, zero):
    """Of another step, with NaN in them, and of another ep_size."""
    build = partial(native_engine, zero)
    two_ranks(_save, str(tmp_path), build)
    other = r"zero_pp_rank_1_\S+: got optimizer state of \d+ parameters, expected this rank's \d+ \(weights alone load"
    two_ranks(_load, str(tmp_path), partial(native_engine, zero, 1), other)
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shutil.copy(tmp_path / "step0" / name, tmp_path / "step1" / name)
    differs = r"rank 1: the optimizer's own copies of \d+ parameters differ, first of 'layers"
    two_ranks(_load, str(tmp_path), build, differs, False, "step1")
    file = tmp_path / "step0" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    copies = "single_partition_of_fp32_groups"
    change(file, lambda state: state["optimizer_state_dict"][copies][1].detach()[3].fill_(float("nan")))
    two_ranks(_load, str(tmp_path), build, rf"zero_pp_rank_1_\S+: {copies}\[1\]: got 1 NaN or inf")


def test_zero_3_reads_the_files_of_its_rank(two_ranks, tmp_path):
    build = partial(autoep_engine, 3)
    two_ranks(_save, str(tmp_path), build)
    for kind in ("model", "optim"):
        file = tmp_path / "step0" / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt"
        shutil.copy(file.with_name(file.name.replace("rank_1", "rank_0")), file)
    message = r"zero_pp_rank_1_\S+: layer 'model.layers.0.mlp': got experts \[0, 1\], expected \[2, 3\] on this rank"
    two_ranks(_load, str(tmp_path), build, message)
    truncate(file)
    two_ranks(_load, str(tmp_path), build, r"zero_pp_rank_1_\S+optim_states.pt: cannot be read, it may be truncated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_tell_values_and_their_order_apart(dtype):
    """Of integers that are their own bits: rows [1, 2], [3, 4] give 1 * 3 + 2 * 7, the second tensor twice that."""
    bits = torch.tensor([[1, 2], [3, 4]], dtype={4: torch.int32, 2: torch.int16}[dtype.itemsize])
    value = bits.view(dtype)
    assert checksum([value]) == 17 and checksum([value, value]) == 17 + 2 * 17
    assert checksum([value.flip(0)]) == 7 + 2 * 3
    assert checksum([-value]) != checksum([value]) != checksum([value.t()])
