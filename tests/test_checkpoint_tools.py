"""``ds-tileoverlap ckpt``: what it says of checkpoints, and what becomes of them on the other side and in an engine."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import comm
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from models import PLAIN, Gated
from safetensors.torch import load_file

from ds_tileoverlap.ckpt import files, planning
from ds_tileoverlap.cli import main

transformers = pytest.importorskip("transformers")
from checkpoint_folders import (  # noqa: E402
    EXPERT,
    FAMILIES,
    MODEL,
    SMALL,
    STEP,
    TOKENS,
    assert_equal,
    change,
    edit_of,
    inspected,
    loaded,
    logits_of,
    poisoned,
    to_deepspeed,
    to_hf,
    weights_in,
)  # fmt: skip

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(folders, tmp_path, family):
    hf, ds = folders(family)
    assert to_hf(ds, tmp_path / "back", hf, "--max-shard-size", "40KB") == 0
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    assert all(f.stat().st_size < 42_000 for f in (tmp_path / "back").glob("*.safetensors"))
    assert_equal(weights_in(tmp_path / "back"), weights_in(hf))
    assert torch.equal(logits_of(loaded(tmp_path / "back")), logits_of(loaded(hf)))
    assert not torch.equal(logits_of(loaded(hf))[0, 0], logits_of(loaded(hf))[0, 1])


def test_files_hold_no_more_than_their_tensors(folders):
    hf, ds = folders("qwen3_moe")
    inner = 3 * 24 * 32 * 4
    for file in (ds / "global_step0").glob("layer_*"):
        assert inner < file.stat().st_size < inner + 4096
    others = sum(value.nbytes for name, value in weights_in(hf).items() if ".experts." not in name)
    assert others < (ds / "global_step0" / MODEL).stat().st_size < others + 16384


def test_inspect_json(folders, capsys):
    hf, ds = folders("mixtral")
    found = {kind: inspected(capsys, path) for kind, path in (("hf", hf), ("deepspeed", ds))}
    assert found["hf"]["model_type"] == "mixtral"
    assert (found["deepspeed"]["tag"], found["deepspeed"]["step"]) == ("global_step0", 0)
    assert found["deepspeed"]["optimizer_files"] == []
    for kind, prefix, gate in (("hf", "block_sparse_moe", "w1"), ("deepspeed", "mlp", "gate_proj")):
        assert found[kind]["kind"] == kind and found[kind]["faults"] == []
        layer = found[kind]["moe_layers"][1]
        assert (layer["prefix"], layer["num_experts"]) == (f"model.layers.1.{prefix}", 4)
        assert (layer["missing"], layer["extra"]) == ([], [])
        assert layer["tensors"][f"{gate}.weight"] == {"shape": [24, 32], "dtype": "float32"}
        assert layer["experts"]["3"]["bytes"] == 3 * 24 * 32 * 4
    assert found["deepspeed"]["moe_layers"][1]["experts"]["2"]["files"] == [EXPERT.format(1, 2)]
    sums = {kind: [e["sha256"] for x in found[kind]["moe_layers"] for e in x["experts"].values()] for kind in found}
    assert sums["hf"] == sums["deepspeed"] and len(set(sums["hf"])) == 8


def test_inspect_for_people(folders, capsys):
    hf, ds = folders("qwen2_moe")
    capsys.readouterr()
    assert main(["ckpt", "inspect", str(ds)]) == 0
    shown = capsys.readouterr().out
    for part in ("global_step0", "model.layers.1.mlp", "8 of 8", "gate_proj.weight [24, 32] float32", "sound"):
        assert part in shown
    assert shown.count("layer_1_expert_") == 8


def test_command_in_a_shell(folders):
    """Without an accelerator and without anything that says so, stdout is still one JSON object."""
    env = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ds_tileoverlap", "ckpt", "inspect", str(folders("mixtral")[1]), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "deepspeed"


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "{tmp}/nothing"],
        ["inspect", "{tmp}"],
        ["convert", "{hf}", "{tmp}/target", "--to", "elsewhere"],
        ["convert", "{hf}", "{tmp}/target", "--to", "hf", "--config", "{hf}"],
        ["convert", "{ds}", "{tmp}/target", "--to", "deepspeed"],
        ["convert", "{ds}", "{tmp}/target", "--to", "hf"],
        ["convert", "{ds}", "{tmp}/target", "--to", "hf", "--config", "{tmp}"],
        ["convert", "{hf}", "{tmp}/target", "--to", "deepspeed", "--config", "{hf}"],
        ["convert", "{hf}", "{tmp}/none/target", "--to", "deepspeed"],
        ["convert", "{hf}", "{hf}/target", "--to", "deepspeed"],
        ["convert", "{hf}", "{tmp}/target", "--to", "deepspeed", "--family", "gpt2"],
        ["convert", "{hf}", "{tmp}/target", "--to", "deepspeed", "--map", "{tmp}/none.yaml"],
        ["convert", "{hf}", "{tmp}/target", "--to", "deepspeed", "--tag", "{tmp}/elsewhere"],
        ["convert", "{hf}", "{tmp}/target", "--to", "deepspeed", "--ep-size", "0"],
        ["convert", "{ds}", "{tmp}/target", "--to", "hf", "--config", "{hf}", "--max-shard-size", "5 pounds"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_wrong_usage(folders, tmp_path, capsys, arguments):
    hf, ds = folders("qwen3_moe")
    capsys.readouterr()
    try:
        code = main(["ckpt", *(argument.format(hf=hf, ds=ds, tmp=tmp_path) for argument in arguments)])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert re.search("expected|required|choose from|cannot be read", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_autoep_is_no_broken_one(folders, tmp_path, capsys):
    hf, ds = folders("qwen3_moe")
    shutil.copytree(ds, tmp_path / "ds")
    change(tmp_path / "ds" / STEP / MODEL, lambda state: state.update(ds_autoep_layers=[{}]))
    for more in (["inspect"], ["convert", str(tmp_path / "target"), "--to", "hf", "--config", str(hf)]):
        capsys.readouterr()
        assert main(["ckpt", more[0], str(tmp_path / "ds"), *more[1:]]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "got a checkpoint of AutoEP's layers" in err and "hf_export.save_pretrained" in err
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_target_exists(folders, tmp_path, capsys, kind):
    hf, ds = folders("olmoe")
    target = tmp_path / "target"
    {"file": target.touch, "folder": target.mkdir, "dangling link": lambda: target.symlink_to("nowhere")}[kind]()
    assert to_hf(ds, target, hf) == 2
    assert f"{target}: exists" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
    assert not target.is_dir() or not list(target.iterdir())


def test_ep_size_has_to_divide(folders, tmp_path, capsys):
    hf, _ = folders("qwen3_moe")
    assert to_deepspeed(hf, tmp_path / "a", "--ep-size", "3") == 1
    assert "got 8 experts, expected a multiple of --ep-size 3" in capsys.readouterr().err
    assert to_deepspeed(hf, tmp_path / "b", "--ep-size", "4") == 0
    assert "Optimizer state is not carried over" in capsys.readouterr().out


def test_dtype(folders, tmp_path, capsys):
    hf, ds = folders("deepseek_v3")
    assert to_hf(ds, tmp_path / "bf16", hf, "--dtype", "bf16") == 0
    kept = ".e_score_correction_bias"
    for name, value in weights_in(hf).items():
        expected = value if name.endswith(kept) else value.bfloat16()
        assert_equal({name: weights_in(tmp_path / "bf16")[name]}, {name: expected})
    assert loaded(tmp_path / "bf16").dtype == torch.bfloat16
    large = shutil.copytree(ds, tmp_path / "large")
    change(large / STEP / EXPERT.format(0, 1), edit_of("gate_proj", poisoned(1e6)))
    assert to_hf(large, tmp_path / "fp16", hf, "--dtype", "fp16") == 1
    assert "got 1 NaN or inf in torch.float16" in capsys.readouterr().err


def test_companions_of_the_weights(folders, tmp_path):
    hf, ds = folders("olmoe")
    config = shutil.copytree(hf, tmp_path / "config")
    (config / "tokenizer.json").write_text("{}")
    (config / "pytorch_model.bin").write_text("not this one")
    assert to_hf(ds, tmp_path / "target", config) == 0
    expected = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "target").iterdir()} == expected


def test_layers_are_counted_as_modules_come(tmp_path):
    config = transformers.OlmoeConfig(num_experts=2, num_experts_per_tok=1, **{**SMALL, "num_hidden_layers": 11})
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert to_deepspeed(tmp_path / "hf", tmp_path / "ds") == 0
    for layer in range(11):
        for name in torch.load(tmp_path / "ds" / STEP / EXPERT.format(layer, 1)):
            assert name.startswith(f"model.layers.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.1.")


def test_tied_weights_have_both_names(tmp_path):
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(num_experts=2, num_experts_per_tok=1, tie_word_embeddings=True, **SMALL)
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert "lm_head.weight" not in weights_in(tmp_path / "hf")
    assert to_deepspeed(tmp_path / "hf", tmp_path / "ds") == 0
    module = torch.load(tmp_path / "ds" / STEP / MODEL)["module"]
    assert torch.equal(module["lm_head.weight"], module["model.embed_tokens.weight"])
    assert to_hf(tmp_path / "ds", tmp_path / "back", tmp_path / "hf") == 0
    assert torch.equal(logits_of(loaded(tmp_path / "back")), logits_of(loaded(tmp_path / "hf")))


def test_map_of_the_configs(folders, tmp_path, capsys):
    hf, _ = folders("deepseek_v2")
    option = "--map", str(ROOT / "configs" / "checkpoint_names.yaml")
    assert to_deepspeed(hf, tmp_path / "ds", *option) == 0
    expert = "model.layers.1.mlp.moe.deepspeed_moe.experts.deepspeed_experts.2"
    names = {f"{expert}.w{i}.weight" for i in (1, 2, 3)}
    assert set(torch.load(tmp_path / "ds" / STEP / EXPERT.format(0, 2))) == names
    module = torch.load(tmp_path / "ds" / STEP / MODEL)["module"]
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in module
    assert "model.layers.1.mlp.moe.deepspeed_moe.gate.wg.weight" in module
    assert to_hf(tmp_path / "ds", tmp_path / "back", hf, *option) == 0
    assert_equal(weights_in(tmp_path / "back"), weights_in(hf))
    capsys.readouterr()
    assert to_hf(tmp_path / "ds", tmp_path / "unmapped", hf) == 1
    said = capsys.readouterr().err
    assert "got model.layers.1.mlp.moe, expected MoE layers at model.layers.<N>.mlp (try --map)" in said


def test_projections_of_other_names_need_a_map(folders, tmp_path, capsys):
    hf, _ = folders("qwen3_moe")
    (tmp_path / "map.json").write_text(json.dumps({"to_deepspeed": [["gate_proj", "w1"]]}))
    assert to_deepspeed(hf, tmp_path / "ds", "--map", str(tmp_path / "map.json")) == 0
    assert to_hf(tmp_path / "ds", tmp_path / "back", hf) == 1
    said = capsys.readouterr().err
    assert "model.layers.0.mlp.experts.7.gate_proj.weight: missing, expected shape [24, 32]" in said
    assert "got model.layers.1.mlp.experts.7.w1.weight, expected gate_proj.weight, up_proj.weight" in said


@pytest.mark.parametrize(
    "text,message",
    [
        ("[]", r"expected the keys to_hf and to_deepspeed"),
        ("to_hff: []", "got .'to_hff'., expected the keys"),
        ("to_hf: x", r"to_hf\[0\]: got 'x', expected"),
        ("to_hf: [['a', 'b'], ['(', '']]", r"to_hf\[1\]: got .* unterminated subpattern"),
        (r"to_deepspeed: [['a', '\1']]", r"to_deepspeed\[0\]: got .* invalid group reference"),
        ("to_hf: [", "cannot be read"),
    ],
)
def test_wrong_map(folders, tmp_path, capsys, text, message):
    hf, ds = folders("qwen3_moe")
    (tmp_path / "map.yaml").write_text(text)
    assert to_hf(ds, tmp_path / "target", hf, "--map", str(tmp_path / "map.yaml")) == 2
    assert re.search(message, capsys.readouterr().err)


def test_names_that_clash(folders, tmp_path, capsys):
    hf, ds = folders("qwen3_moe")
    (tmp_path / "map.json").write_text(json.dumps({"to_hf": [["up_proj", "gate_proj"]]}))
    assert to_hf(ds, tmp_path / "target", hf, "--map", str(tmp_path / "map.json")) == 1
    assert re.search("up_proj.weight: becomes .*gate_proj.weight as .* does", capsys.readouterr().err)


def test_residual_moe_is_refused(folders, tmp_path, capsys):
    hf, ds = folders("qwen3_moe")
    source = shutil.copytree(ds, tmp_path / "source")
    extra = {"model.layers.0.mlp.coefficient.weight": torch.ones(2, 32)}
    change(source / STEP / MODEL, lambda state: state["module"].update(extra))
    assert to_hf(source, tmp_path / "target", hf) == 1
    assert "coefficient.weight: got a residual MoE" in capsys.readouterr().err


class Seed:
    """Of a class that a checkpoint may hold, and nobody but its job knows."""

    def __init__(self):
        self.value = 3


def make_folder(path):
    os.mkdir(path)


class Runs:
    """Calls a function where it is unpickled."""

    def __init__(self, function, folder):
        self.call = function, (str(folder),)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [make_folder, os.mkdir])
def test_no_code_of_a_checkpoint_is_run(folders, tmp_path, capsys, function):
    source = shutil.copytree(folders("qwen3_moe")[1], tmp_path / "source")
    added = {"args": argparse.Namespace(a=1), "seed": Seed(), "runs": Runs(function, tmp_path / "made")}
    change(source / STEP / MODEL, lambda state: state.update(added))
    if function is make_folder:
        assert inspected(capsys, source)["faults"] == []
    else:
        assert "mkdir whose module" in inspected(capsys, source, code=1)["faults"][0]
    assert not (tmp_path / "made").exists()
    torch.load(source / STEP / MODEL, weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("to", ["hf", "deepspeed"])
def test_one_expert_in_memory(folders, tmp_path, monkeypatch, to):
    """Tensors of experts that live when a value is read: those of one expert, and the one that was used last."""
    hf, ds = folders("qwen3_moe")
    alive, counts, read, load = weakref.WeakValueDictionary(), [], files.read, files.load

    def keep(key, value):
        if ".experts." in key or ".deepspeed_experts." in key:
            alive[id(value)] = value
            counts.append(len(alive))
        return value

    def counted_read(entries):
        entries = list(entries)
        for entry, value in zip(entries, read(entries)):
            yield keep(entry.key, value)

    monkeypatch.setattr(planning, "read", counted_read)
    monkeypatch.setattr(files, "load", lambda file: {key: keep(key, value) for key, value in load(file).items()})
    convert = {"hf": lambda: to_hf(ds, tmp_path / "t", hf), "deepspeed": lambda: to_deepspeed(hf, tmp_path / "t")}[to]
    assert convert() == 0
    read_twice = 2 * 2 * 8 * 3
    assert len(counts) >= read_twice and max(counts) <= 3 + 1


def test_writer_of_safetensors(tmp_path):
    values = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "view": torch.arange(12.0).reshape(3, 4).t(),
        "half": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False]),
    }
    entries = {name: files.Entry(tmp_path, name, tuple(v.shape), v.dtype) for name, v in values.items()}
    files.write_safetensors(tmp_path / "x.safetensors", entries, values.values())
    assert_equal(load_file(tmp_path / "x.safetensors"), values)
    assert files.entries_of(tmp_path / "x.safetensors")["half"].dtype == torch.bfloat16


class Block(StockMoE):
    """DeepSpeed's MoE in the place of a Hugging Face model's block."""

    def forward(self, x):
        return super().forward(x)[0]


def native_engine(family, zero):
    """The family's model with DeepSpeed's MoE layers, two ranks wide; its own random weights."""
    model = FAMILIES[family]()[1]
    config = model.config
    number = model.model.layers[0].mlp.experts.num_experts
    for layer in model.model.layers:
        expert = Gated(config.hidden_size, 24)
        layer.mlp = Block(config.hidden_size, expert, number, 2, config.num_experts_per_tok, **PLAIN)
    for name, parameter in model.named_parameters():
        if "deepspeed_experts" not in name:
            comm.broadcast(parameter.data, 0)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)[0]


def _load_train_save_worker(family, zero, source, target):
    """Logits after loading, and after a step of training that is saved."""
    engine = native_engine(family, zero)
    engine.load_checkpoint(source, load_module_only=True)
    engine.eval()
    before = logits_of(engine)
    engine.train()
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    engine.step()
    engine.save_checkpoint(target)
    engine.eval()
    return before, logits_of(engine)


@pytest.mark.parametrize("family,zero", [("mixtral", 0), ("mixtral", 1), ("qwen3_moe", 2)])
def test_engine_loads_trains_and_saves(two_ranks, folders, tmp_path, capsys, family, zero):
    """Weights of Hugging Face compute the same in an engine of two ranks, and what it has learnt comes back."""
    hf, ds = folders(family)
    (before, after), other = two_ranks(_load_train_save_worker, family, zero, str(ds), str(tmp_path / "trained"))
    original = logits_of(loaded(hf))
    torch.testing.assert_close(before, original, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other[0], original, rtol=1e-4, atol=1e-5)

    found = inspected(capsys, tmp_path / "trained")
    assert (found["tag"], found["step"], found["faults"]) == ("global_step1", 1, [])
    assert len(found["optimizer_files"]) == 2
    assert to_hf(tmp_path / "trained", tmp_path / "back", hf) == 0
    trained = logits_of(loaded(tmp_path / "back"))
    torch.testing.assert_close(trained, after, rtol=1e-4, atol=1e-5)
    assert (trained - original).abs().max() > 1e-2
