"""Hugging Face models under DeepSpeed's engine, through AutoEP."""

import deepspeed
from hf_models import batch

# What AutoEP has to be told of a peft model; ours fills it in.
FOR_PEFT = {"moe_layer_pattern": r"(base_model\.model\.)?model\.layers\.\d+\.mlp"}
OURS, STOCK = "TileAutoEPMoELayer", "AutoEPMoELayer"


def experts_on(ep_size, enabled):
    return {"enabled": True, "autoep_size": ep_size, **({} if enabled else FOR_PEFT)}


def engine_of(model, enabled=True, zero=0, **config):
    """An engine that trains the model with AdamW, its experts on two ranks."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "expert_parallel": experts_on(2, enabled),
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
