"""Broken checkpoints, and interrupted conversions: what is wrong is named, nothing is written, the source stays."""

import json
import os
import re
import shutil
import signal

import pytest
import torch

from ds_tileoverlap.ckpt import conversion, files

pytest.importorskip("transformers")
from checkpoint_folders import (  # noqa: E402
    EXPERT,
    MODEL,
    STEP,
    WEIGHTS,
    change,
    content_of,
    edit_config,
    edit_of,
    inspected,
    poisoned,
    rename,
    to_deepspeed,
    to_hf,
    truncate,
)  # fmt: skip

INDEX = "model.safetensors.index.json"
# Name -> (what is done to a sound checkpoint, what has to be said of it).
DAMAGES = {
    "missing expert": (lambda d: (d / STEP / EXPERT.format(1, 3)).unlink(), r"layer_1_expert_3_.*: missing.*0 to 7"),
    "extra expert": (
        lambda d: shutil.copy(d / STEP / EXPERT.format(1, 3), d / STEP / EXPERT.format(1, 8)),
        r"layer_1_expert_8_.*(extra.*experts 0 to 7|experts\.8)",
    ),
    "extra layer": (
        lambda d: shutil.copy(d / STEP / EXPERT.format(1, 0), d / STEP / EXPERT.format(2, 0)),
        "layer_2_expert_0_.*extra, expected no such layer",
    ),
    "other expert": (
        lambda d: shutil.copy(d / STEP / EXPERT.format(1, 3), d / STEP / EXPERT.format(1, 2)),
        r"layer_1_expert_2_.*experts\.3\..*expected .*experts\.2",
    ),
    "other layer": (
        lambda d: shutil.copy(d / STEP / EXPERT.format(0, 3), d / STEP / EXPERT.format(1, 3)),
        r"layer_1_expert_3_.*layers\.0\..*experts\.3\..*expected .*layers\.1\..*experts\.3",
    ),
    "missing key": (
        lambda d: change(d / STEP / EXPERT.format(0, 0), edit_of("up_proj", lambda v: None)),
        r"layer_0_expert_0_.*up_proj.weight: missing, expected shape \[24, 32\]",
    ),
    "shape": (
        lambda d: change(d / STEP / EXPERT.format(0, 5), edit_of("down_proj", lambda v: v[:, :20].clone())),
        r"layer_0_expert_5_.*experts\.5\.down_proj.weight: got shape \[32, 20\], expected \[32, 24\]",
    ),
    "dtype": (
        lambda d: change(d / STEP / EXPERT.format(1, 1), edit_of("gate_proj", torch.Tensor.bfloat16)),
        r"layer_1_expert_1_.*gate_proj.weight: got torch.bfloat16, expected torch.float32",
    ),
    "nan": (
        lambda d: change(d / STEP / EXPERT.format(1, 1), edit_of("gate_proj", poisoned(float("nan")))),
        r"layer_1_expert_1_.*experts\.1\.gate_proj.weight: got 1 NaN or inf",
    ),
    "inf elsewhere": (
        lambda d: change(d / STEP / MODEL, lambda s: edit_of("embed_tokens", poisoned(float("-inf")))(s["module"])),
        "mp_rank_00_.*embed_tokens.weight: got 1 NaN or inf",
    ),
    "truncated expert": (lambda d: truncate(d / STEP / EXPERT.format(0, 2)), "layer_0_expert_2_.*cannot be read"),
    "truncated model": (lambda d: truncate(d / STEP / MODEL), "/mp_rank_00_.*cannot be read"),
    "empty expert": (lambda d: (d / STEP / EXPERT.format(0, 2)).write_bytes(b""), "layer_0_expert_2_.*cannot be read"),
    "no model": (lambda d: (d / STEP / MODEL).unlink(), "/mp_rank_00_model_states.pt: missing"),
    "latest": (lambda d: (d / "latest").write_text("step9"), "step9: missing; tags that are there: global_step0"),
    "shards": (
        lambda d: shutil.copy(d / STEP / MODEL, d / STEP / "mp_rank_01_model_states.pt"),
        "got mp_rank_01_.*no tensor parallelism",
    ),
    "legacy": (lambda d: change(d / STEP / MODEL, lambda s: s.update(num_experts=8)), "num_experts: got 8, expected a"),
    "pipeline": (lambda d: change(d / STEP / MODEL, lambda s: s.update(module=None)), "module: got NoneType, expected"),
    "hf missing expert": (
        lambda d: change(d / WEIGHTS, lambda s: [s.pop(k) for k in list(s) if "layers.1.mlp.experts.3." in k]),
        r"layers\.1\.mlp\.experts\.3: missing, expected experts 0 to 7",
    ),
    "hf extra expert": (
        lambda d: change(d / WEIGHTS, rename("layers.1.mlp.experts.3.up_proj", "layers.1.mlp.experts.9.up_proj")),
        r"layers\.1\.mlp\.experts\.9: extra, expected experts 0 to 7",
    ),
    "hf shape": (
        lambda d: change(d / WEIGHTS, edit_of("layers.0.mlp.experts.7.up_proj", lambda v: v[:12].clone())),
        r"model.safetensors: .*experts\.7\.up_proj.weight: got shape \[12, 32\], expected \[24, 32\]",
    ),
    "hf dtype": (
        lambda d: change(d / WEIGHTS, edit_of("layers.0.mlp.experts.7.up_proj", torch.Tensor.half)),
        r"experts\.7\.up_proj.weight: got torch.float16, expected torch.float32",
    ),
    "hf nan": (
        lambda d: change(d / WEIGHTS, edit_of("layers.0.mlp.experts.7.up_proj", poisoned(float("nan")))),
        r"model.safetensors: .*experts\.7\.up_proj.weight: got 1 NaN or inf",
    ),
    "hf truncated": (lambda d: truncate(d / WEIGHTS), "model.safetensors: cannot be read"),
    "hf no weights": (lambda d: (d / WEIGHTS).unlink(), "model.safetensors: missing"),
    "hf config": (lambda d: (d / "config.json").write_text("{"), "config.json: cannot be read"),
    "hf index": (
        lambda d: (d / INDEX).write_text(json.dumps({"weight_map": {"a.weight": WEIGHTS}})),
        "model.safetensors: a.weight: missing, expected by model.safetensors.index.json",
    ),
    "hf missing shard": (
        lambda d: (d / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "model-2.safetensors"}})),
        "model-2.safetensors: missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_stays_alone(folders, tmp_path, capsys, damage):
    hf, ds = folders("qwen3_moe")
    break_it, message = DAMAGES[damage]
    source = shutil.copytree(hf if damage.startswith("hf") else ds, tmp_path / "source")
    assert inspected(capsys, source)["faults"] == []
    break_it(source)
    before = content_of(source)
    faults = inspected(capsys, source, code=1)["faults"]
    assert any(re.search(message, fault) for fault in faults), faults
    convert = to_deepspeed if damage.startswith("hf") else lambda s, t: to_hf(s, t, hf)
    if damage != "hf config":
        assert convert(source, tmp_path / "target") == 1
        assert re.search(message, capsys.readouterr().err)
    assert content_of(source) == before
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("dtype", [dtype for dtype in files.DTYPES.values() if dtype.is_floating_point], ids=str)
def test_nonfinite_values_are_counted(dtype):
    """Also where all are so large that their sum is not finite."""
    value = torch.full((3, 5), torch.finfo(dtype).max, dtype=torch.float64)
    assert files.count_nonfinite(value.to(dtype)) == 0
    value[0, 4] = value[2, 1] = float("nan")
    assert files.count_nonfinite(value.to(dtype)) == 2


UNFIT = {
    "experts": (dict(num_local_experts=16), r"layers\.0\.mlp\.experts\.8\.gate_proj\.weight: missing, expected"),
    "fewer experts": (dict(num_local_experts=4), r"experts\.4\..* expected .* of 4 experts"),
    "inner size": (dict(moe_intermediate_size=48), r"gate_proj\.weight: got shape \[24, 32\], expected \[48, 32\]"),
    "hidden size": (dict(hidden_size=64), r"gate.wg.weight: got shape \[8, 32\], expected \[8, 64\]"),
    "layers": (dict(num_hidden_layers=3), r"layers\.2: missing, expected as many layers"),
    "no experts": (dict(num_local_experts=None), "got no number of experts"),
    "quantised": (dict(quantization_config={"quant_method": "fp8"}), "quantization_config: got quantised"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_config_of_another_model(folders, tmp_path, capsys, unfit):
    hf, ds = folders("qwen3_moe")
    changes, message = UNFIT[unfit]
    config = shutil.copytree(hf, tmp_path / "config")
    edit_config(config, **changes)
    assert to_hf(ds, tmp_path / "target", config) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["error", "interrupt", "terminated"])
@pytest.mark.parametrize("to", ["hf", "deepspeed"])
def test_interruption_leaves_nothing(folders, tmp_path, monkeypatch, kind, to):
    hf, ds = folders("qwen3_moe")
    owner, name = (conversion, "write_safetensors") if to == "hf" else (torch, "save")
    original, calls = getattr(owner, name), []

    def breaks(*args):
        calls.append(args)
        if len(calls) < 4:
            return original(*args)
        assert [file for file in tmp_path.iterdir() if file.name.endswith(".partial") and any(file.rglob("*"))]
        if kind == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        raise {"error": OSError("disk full"), "interrupt": KeyboardInterrupt()}[kind]

    monkeypatch.setattr(owner, name, breaks)
    run = {"hf": lambda t: to_hf(ds, t, hf, "--max-shard-size", "20KB"), "deepspeed": lambda t: to_deepspeed(hf, t)}[to]
    if kind == "error":
        assert run(tmp_path / "target") == 1
    else:
        with pytest.raises(SystemExit if kind == "terminated" else KeyboardInterrupt):
            run(tmp_path / "target")
    assert len(calls) == 4 and list(tmp_path.iterdir()) == []


def test_a_target_that_appears_meanwhile_stays(folders, tmp_path, monkeypatch, capsys):
    (hf, _), target, save = folders("qwen3_moe"), tmp_path / "target", torch.save

    def saves(*args):
        # Empty: a folder could take its name without an error.
        target.mkdir(exist_ok=True)
        save(*args)

    monkeypatch.setattr(torch, "save", saves)
    assert to_deepspeed(hf, target) == 2
    assert f"{target}: exists, expected a new folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [target] and not any(target.iterdir())
