"""Tiny checkpoints of every family in both forms, the commands on them, and ways to change what is in their files."""

import json

import torch
import transformers
from hf_models import FAMILIES as AUTOEP_FAMILIES
from hf_models import SMALL
from safetensors.torch import load_file, save_file

from ds_tileoverlap.ckpt import names
from ds_tileoverlap.cli import main

STEP, WEIGHTS = "global_step0", "model.safetensors"
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"
TOKENS = torch.arange(24).reshape(2, 12)


def deepseek_v2():
    config = transformers.DeepseekV2Config(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, **{**SMALL, "num_key_value_heads": 4},
    )  # fmt: skip
    return None, transformers.DeepseekV2ForCausalLM(config)


MODELS = {**AUTOEP_FAMILIES, "deepseek_v2": deepseek_v2}
FAMILIES = {name: MODELS[name] for name in names.FAMILIES}


def model_of(family):
    """The family's tiny model; every weight and buffer is random, so that none can stand in for another."""
    torch.manual_seed(0)
    model = FAMILIES[family]()[1].float().eval()
    for value in model.state_dict().values():
        value.copy_(0.2 * torch.randn(value.shape))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def weights_in(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def loaded(folder):
    """The folder's model as plain transformers loads it, which must find every weight."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def to_hf(source, target, config, *options):
    return main(["ckpt", "convert", str(source), str(target), "--to", "hf", "--config", str(config), *options])


def to_deepspeed(source, target, *options):
    return main(["ckpt", "convert", str(source), str(target), "--to", "deepspeed", *options])


def make(family, root):
    """The family's Hugging Face folder and its DeepSpeed checkpoint, in ``root``."""
    model_of(family).save_pretrained(root / "hf")
    assert to_deepspeed(root / "hf", root / "ds") == 0
    return root / "hf", root / "ds"


def inspected(capsys, path, code=0):
    """What ``inspect --json`` prints."""
    capsys.readouterr()
    assert main(["ckpt", "inspect", str(path), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def content_of(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def change(file, edit):
    """Lets ``edit`` change the state in a file of either format."""
    safetensors = file.suffix == ".safetensors"
    state = load_file(file) if safetensors else torch.load(file, weights_only=False)
    edit(state)
    (save_file if safetensors else torch.save)(state, file)


def edit_of(part, edit):
    """A change to the one tensor whose name has ``part``; an edit that returns nothing takes it away."""

    def apply(state):
        (name,) = (name for name in state if part in name)
        if (value := edit(state.pop(name))) is not None:
            state[name] = value

    return apply


def truncate(file):
    """Leaves two thirds of it."""
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size * 2 // 3)


def poisoned(what):
    """An edit that makes one value ``what``."""

    def edit(value):
        value[3, 4] = what
        return value

    return edit


def rename(part, new):
    """A change to the name of the one tensor whose name has ``part``."""

    def apply(state):
        (name,) = (name for name in state if part in name)
        state[name.replace(part, new)] = state.pop(name)

    return apply


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
