"""Fine-tuning of Hugging Face folders through AutoEP on our stages, and what comes back."""

import json
import re
import sys

import corpus
import deepspeed
import gpt_oss_models
import pytest
import torch
from deepspeed import comm
from deepspeed.utils import safe_get_full_grad
from hf_engines import OURS, STOCK, engine_of, experts_on, train
from hf_models import batch, model_of
from launched import ROOT, launcher, run
from models import assert_close
from options import UsageError

from ds_tileoverlap.hf_export import hf_state_dict, save_pretrained
from ds_tileoverlap.load_check import LoadError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")
import finetune_hf  # noqa: E402
import tokenizers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

# The first start of DeepSpeed on a machine compiles its shared-memory collectives, which takes minutes.
LIMIT_S = 400


def folder_of(family, path, dtype=torch.float32):
    model_of(family)[1].to(dtype).save_pretrained(path)
    return str(path)


# --- Hugging Face folder -> engine -> Hugging Face folder


def _round_trip(source, target, enabled, bf16, zero):
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    engine = engine_of(model, enabled, zero, bf16={"enabled": bf16})
    save_pretrained(engine, target)


@pytest.mark.parametrize(
    "family,enabled,dtype,zero",
    [
        ("qwen3_moe", True, torch.float32, 0),
        ("qwen3_moe", True, torch.bfloat16, 2),
        ("mixtral", True, torch.float32, 2),
        ("qwen3_moe", True, torch.bfloat16, 3),
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
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    assert all(got[name].dtype == expected[name].dtype for name in got)


def _gpt_oss_round_trip(source, target):
    save_pretrained(gpt_oss_models.engine_of(transformers.AutoModelForCausalLM.from_pretrained(source), 2), target)


def test_an_untrained_gpt_oss_comes_back_bitwise(two_ranks, tmp_path):
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    gpt_oss_models.model_of().save_pretrained(source)
    two_ranks(_gpt_oss_round_trip, source, target)
    expected, got = (load_file(f"{folder}/model.safetensors") for folder in (source, target))
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def _save_16bit(folder, build, zero):
    gathers = {"zero_optimization": {"stage": zero, "stage3_gather_16bit_weights_on_model_save": True}}
    engine = build(0) if build is _gpt_oss else engine_of(build(0), **gathers)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True) is True
    if zero == 3:  # what transformers' Trainer asks for
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (comm.get_rank() > 0)


def _gpt_oss(seed):
    model = gpt_oss_models.model_of()
    model.lm_head.requires_grad_(False)
    return gpt_oss_models.engine_of(model, 2)


@pytest.mark.parametrize("case", ["full-0", "full-3", "lora-0", "lora-3", "gpt_oss"])
def test_save_16bit_model_writes_the_model_as_it_was(two_ranks, tmp_path, case):
    """Names and values of all weights; DeepSpeed itself writes rank 0's experts, and under ZeRO-3 nothing."""
    kind, _, zero = case.partition("-")
    build = {"full": _full, "lora": _lora, "gpt_oss": _gpt_oss}[kind]
    two_ranks(_save_16bit, str(tmp_path), build, int(zero or 0))
    model = gpt_oss_models.model_of() if kind == "gpt_oss" else build(0)
    expected = model.state_dict()
    got, trained = (torch.load(tmp_path / name, weights_only=True) for name in ("pytorch_model.bin", "trained.bin"))
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    left_out = {
        "full": (),
        "lora": expected.keys() - {n for n in expected if "lora_" in n},
        "gpt_oss": {"lm_head.weight"},
    }
    assert trained.keys() == expected.keys() - left_out[kind]


def _not_gathered(folder):
    assert engine_of(_full(0), zero=3).save_16bit_model(folder) is False


def test_save_16bit_model_heeds_the_flag_of_zero_3(two_ranks, tmp_path):
    two_ranks(_not_gathered, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


# --- checkpoints in mid-training


def _weights(engine):
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


def _full(seed):
    model = model_of("qwen3_moe")[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + seed)
    return model


def _lora(seed, source=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(source) if source else model_of("qwen3_moe")[1]
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _resume(folder, build, zero, saved_by_us, loaded_by_us):
    straight = engine_of(build(0), zero=zero)
    expected = train(straight, range(4))
    first = engine_of(build(0), saved_by_us, zero)
    train(first, range(2))
    first.save_checkpoint(folder)
    second = engine_of(build(1), loaded_by_us, zero)
    second.load_checkpoint(folder)
    got = train(second, range(2, 4))
    rtol = 0.0 if saved_by_us and loaded_by_us else 1e-4
    assert got == pytest.approx(expected[2:], rel=rtol, abs=0.0)
    assert_close(_weights(second), _weights(straight), rtol)


@pytest.mark.parametrize("saved_by_us,loaded_by_us", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "build,zero", [(_full, 0), (_full, 1), (_full, 2), (_full, 3), (_lora, 0)], ids=lambda v: getattr(v, "__name__", v)
)
def test_resume_equals_an_uninterrupted_run(two_ranks, tmp_path, build, zero, saved_by_us, loaded_by_us):
    two_ranks(_resume, str(tmp_path), build, zero, saved_by_us, loaded_by_us)


def _other_ep_size(folder, ep_size, saved_by_us, loaded_by_us):
    first = engine_of(_full(0), saved_by_us, expert_parallel=experts_on(ep_size, saved_by_us))
    train(first, range(1))
    first.save_checkpoint(folder)
    second = engine_of(_full(1), loaded_by_us, expert_parallel=experts_on(3 - ep_size, loaded_by_us))
    second.load_checkpoint(folder, load_module_only=True)
    expected, got = hf_state_dict(first), hf_state_dict(second)
    assert len(expected) == len(got) and all(torch.equal(got[name], value) for name, value in expected.items())
    if loaded_by_us:
        with pytest.raises(LoadError, match=r"got optimizer state of (ep_size|shape)"):
            second.load_checkpoint(folder)


@pytest.mark.parametrize("saved_by_us,loaded_by_us", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_weights_load_at_another_ep_size(two_ranks, tmp_path, ep_size, saved_by_us, loaded_by_us):
    two_ranks(_other_ep_size, str(tmp_path), ep_size, saved_by_us, loaded_by_us)


# --- LoRA


def _adapters(source, target, zero):
    grads = []
    for enabled in (False, True):
        engine = engine_of(_lora(0, source), enabled, zero)
        start, ids = _weights(engine), batch(0)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        grads.append({name: safe_get_full_grad(p).clone() for name, p in trained.items()})
        engine.step()
        train(engine, range(1, 4))
        moved = {name for name, value in _weights(engine).items() if not torch.equal(value, start[name])}
        assert moved == trained.keys() and all("lora_" in name for name in moved)
    assert_close(grads[1], grads[0], 1e-4)
    save_pretrained(engine, target)
    with torch.no_grad():
        return engine.module.eval()(batch(0)).logits


@pytest.mark.parametrize("family,zero", [("qwen3_moe", 0), ("mixtral", 0), ("qwen3_moe", 3)])
def test_lora(two_ranks, tmp_path, family, zero):
    source, target = folder_of(family, tmp_path / "source"), str(tmp_path / "adapter")
    trained = two_ranks(_adapters, source, target, zero)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        untrained = model(ids).logits
        assert (untrained - trained).abs().max() > 1e-2
        assert (peft.PeftModel.from_pretrained(model, target)(ids).logits - trained).abs().max() < 1e-5


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
from ds_tileoverlap.hf_export import save_pretrained
save_pretrained(trainer.model_wrapped, "saved")
trainer.save_model("by_trainer")
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
    (folder / "train.py").write_text("import ds_tileoverlap" * (through == "import") + TRAINER)
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
    folders = ("source", "saved", "by_trainer")
    source, saved, by_trainer = (load_file(tmp_path / folder / "model.safetensors") for folder in folders)
    assert source.keys() == saved.keys() and not any(torch.equal(source[name], saved[name]) for name in source)
    assert saved.keys() == by_trainer.keys() and all(torch.equal(saved[name], by_trainer[name]) for name in saved)


# --- the example

SMALL = "--seq-len 32 --micro-batch 4 --eval-windows 16 --eval-every 3 --steps 6 --lr 1e-2".split()


def _finetune(*options):
    """Runs the example on two CPU ranks; returns its exit code and everything it printed."""
    script = [str(ROOT / "examples/finetune_hf.py"), "--deepspeed_config", str(ROOT / "configs/finetune_hf.json")]
    return run([*launcher(), *script, *SMALL, *map(str, options)], LIMIT_S)


def _final(code, output):
    """Evaluation losses after training and before."""
    line = re.search(r"final: step=6 .* eval_loss=(\S+) \(before: (\S+)\) .* backend=sequential", output)
    assert code == 0 and line, output
    return float(line[1]), float(line[2])


def _loss(model, text, encode=corpus.as_bytes):
    """What plain transformers say of the example's held-out text."""
    read = corpus.from_files([text], encode) if text else corpus.standard_library(encode)
    windows = read.evaluation(16, 32)
    with torch.no_grad():
        return model(windows, labels=windows).loss.item()


def test_example_trains_all_weights_and_resumes(tmp_path):
    after, before = _final(*_finetune("--demo", "--save-every", 3, "--save-dir", tmp_path / "run"))
    assert after < before - 0.1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert _loss(model, None) == pytest.approx(after, abs=2e-4)

    resume = ("--model", tmp_path / "run/demo", "--resume", tmp_path / "run/step3", "--save-dir", tmp_path / "again")
    assert _final(*_finetune(*resume)) == (after, before)
    first, second = (load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert (tmp_path / "again/loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_example_trains_adapters_on_tokens(tmp_path):
    text = ROOT / "README.md"
    folder_of("mixtral", tmp_path / "source")
    _tokenizer(text).save_pretrained(tmp_path / "source")
    options = ("--model", tmp_path / "source", "--text", text, "--lora")
    after, before = _final(*_finetune(*options, "--save-dir", tmp_path / "run"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    encode = finetune_hf.encoder(transformers.AutoTokenizer.from_pretrained(tmp_path / "run/adapter"))
    assert _loss(model, text, encode) == pytest.approx(before, abs=2e-4)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run/adapter")
    assert _loss(adapted, text, encode) == pytest.approx(after, abs=2e-4) and after < before


def test_example_lists_every_fault(tmp_path, monkeypatch):
    (tmp_path / "adapter").mkdir()
    options = ["--model", "nowhere", "--text", "nothing", "--lora", "--save-dir", str(tmp_path), "--eval-windows", "1"]
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", "--deepspeed_config", "config.json", *options])
    args = finetune_hf.parse_arguments()
    with pytest.raises(UsageError) as error:
        finetune_hf.check(args, finetune_hf.choose_size(args), 2)
    for fault in ("--model: got nowhere", "--text: got nothing", "adapter exists already", "--eval-windows: got 1"):
        assert fault in str(error.value)


def _tokenizer(text):
    """64 tokens, learnt from a text."""
    learnt = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=64, special_tokens=["?", "<end>"], show_progress=False)
    learnt.train([str(text)], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learnt, unk_token="?", eos_token="<end>")
