"""Fine-tuning of Hugging Face folders through AutoEP on our stages, and what comes back."""

import json
import re
import sys

import deepspeed
import pytest
import torch
from deepspeed import comm
from deepspeed.utils import safe_get_full_grad
from launched import ROOT, launcher, run
from models import assert_close
from safetensors.torch import load_file
from test_autoep import batch, model_of

import ds_tileoverlap  # noqa: F401 - makes deepspeed.initialize read the block

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

# What AutoEP has to be told of a peft model; ours fills it in.
FOR_PEFT = {"moe_layer_pattern": r"(base_model\.model\.)?model\.layers\.\d+\.mlp"}
# The first start of DeepSpeed on a machine compiles its shared-memory collectives, which takes minutes.
LIMIT_S = 400
OURS, STOCK = "TileAutoEPMoELayer", "AutoEPMoELayer"


def folder_of(family, path, dtype=torch.float32):
    model_of(family)[1].to(dtype).save_pretrained(path)
    return str(path)


def engine_of(model, enabled=True, zero=0, **config):
    """An engine that trains the model with AdamW, its experts on two ranks."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "expert_parallel": {"enabled": True, "autoep_size": 2, **({} if enabled else FOR_PEFT)},
        "tile_overlap": {"enabled": enabled},
        "steps_per_print": 10**9,
        **config,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    kinds = {type(module).__name__ for module in engine.module.modules() if hasattr(module, "_is_autoep_layer")}
    assert kinds == {OURS if enabled else STOCK}
    return engine


def train(engine, steps):
    losses = []
    for step in steps:
        ids = batch(step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- Hugging Face folder -> engine -> Hugging Face folder


def _round_trip(source, target, enabled, bf16, zero):
    from ds_tileoverlap.hf_export import save_pretrained

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    engine = engine_of(model, enabled, zero, bf16={"enabled": bf16})
    save_pretrained(engine, target)


@pytest.mark.parametrize(
    "family,enabled,dtype,zero",
    [
        ("qwen3_moe", True, torch.float32, 0),
        ("qwen3_moe", True, torch.bfloat16, 2),
        ("mixtral", True, torch.float32, 2),
        ("qwen2_moe", True, torch.float32, 0),
        ("olmoe", True, torch.float32, 0),
        ("deepseek_v3", True, torch.float32, 1),
        ("mixtral", False, torch.float32, 0),
    ],
    ids=str,
)
def test_an_untrained_folder_comes_back_bitwise(two_ranks, tmp_path, family, enabled, dtype, zero):
    source = folder_of(family, tmp_path / "source", dtype)
    target = str(tmp_path / "target")
    two_ranks(_round_trip, source, target, enabled, dtype == torch.bfloat16, zero)
    expected, got = (load_file(f"{folder}/model.safetensors") for folder in (source, target))
    assert_close(got, expected, rtol=0.0)


# --- checkpoints in mid-training


def _weights(engine):
    return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}


def _resume(folder, zero, saved_by_us, loaded_by_us):
    straight = engine_of(model_of("qwen3_moe")[1], zero=zero)
    expected = train(straight, range(4))
    first = engine_of(model_of("qwen3_moe")[1], saved_by_us, zero)
    train(first, range(2))
    first.save_checkpoint(folder)
    second = engine_of(_other_weights(), loaded_by_us, zero)
    second.load_checkpoint(folder)
    got = train(second, range(2, 4))
    rtol = 0.0 if saved_by_us and loaded_by_us else 1e-4
    assert got == pytest.approx(expected[2:], rel=rtol, abs=0.0)
    assert_close(_weights(second), _weights(straight), rtol)


def _other_weights():
    model = model_of("qwen3_moe")[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("saved_by_us,loaded_by_us", [(True, True), (True, False), (False, True)])
def test_resume_equals_an_uninterrupted_run(two_ranks, tmp_path, zero, saved_by_us, loaded_by_us):
    two_ranks(_resume, str(tmp_path), zero, saved_by_us, loaded_by_us)


# --- LoRA


def _lora_model(source):
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _lora(source, target):
    from ds_tileoverlap.hf_export import save_pretrained

    grads, ends = [], []
    for enabled in (False, True):
        engine = engine_of(_lora_model(source), enabled)
        start = _weights(engine)
        ids = batch(0)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        names = {name for name, p in engine.module.named_parameters() if p.requires_grad}
        grads.append({n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad})
        engine.step()
        train(engine, range(1, 4))
        ends.append(_weights(engine))
        moved = {name for name, value in ends[-1].items() if not torch.equal(value, start[name])}
        assert moved == names and all("lora_" in name for name in names)
    assert_close(grads[1], grads[0], 1e-4)
    save_pretrained(engine, target)
    engine.eval()
    with torch.no_grad():
        return engine.module(batch(0)).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_lora(two_ranks, tmp_path, family):
    source, target = folder_of(family, tmp_path / "source"), str(tmp_path / "adapter")
    trained = two_ranks(_lora, source, target)[0]
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(source), target)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(ids).logits - trained).abs().max() < 1e-5


# --- transformers' Trainer

TRAINER = """
import json, pathlib
import torch, transformers
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 12))]
args = transformers.TrainingArguments(
    "out", deepspeed="ds_config.json", max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
    lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
model = transformers.AutoModelForCausalLM.from_pretrained("source")
trainer = transformers.Trainer(model, args, train_dataset=rows)
trainer.train()
layers = {type(m).__name__ for m in trainer.model_wrapped.modules() if hasattr(m, "_is_autoep_layer")}
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
pathlib.Path(f"found{args.process_index}.json").write_text(json.dumps([*layers, losses]))
torch.distributed.destroy_process_group()
"""


def _trained(folder, enabled, through):
    """The class of the MoE layers and the losses of a Trainer run on two ranks."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "tile_overlap": {"enabled": enabled},
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(("import ds_tileoverlap" if through == "import" else "") + TRAINER)
    module = ["--module", "ds_tileoverlap.run"] if through == "launcher" else []
    code, output = run([*launcher(), *module, "train.py"], LIMIT_S, cwd=folder, OMP_NUM_THREADS="1")
    assert code == 0, output
    kind, losses = json.loads((folder / "found0.json").read_text())
    assert [kind, losses] == json.loads((folder / "found1.json").read_text())
    return kind, losses


def test_trainer_reads_the_block(tmp_path):
    folder_of("qwen3_moe", tmp_path / "source")
    kind, expected = _trained(tmp_path, False, "import")
    assert kind == STOCK and len(expected) == 4
    for through in ("import", "launcher"):
        kind, losses = _trained(tmp_path, True, through)
        assert kind == OURS and losses == pytest.approx(expected, abs=1e-4)
