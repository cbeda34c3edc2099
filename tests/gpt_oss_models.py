"""Tiny GPT-OSS models and engines that train them."""

import deepspeed
import pytest
import torch

transformers = pytest.importorskip("transformers")
from ds_tileoverlap import gpt_oss  # noqa: E402
from ds_tileoverlap.gpt_oss import TileGptOssMLP  # noqa: E402

LR = 0.1
# So small that gates and ups of these models are clamped.
LIMIT = 0.05
SMALL = dict(
    num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=32, intermediate_size=24,
    vocab_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


def model_of(seed=0, limit=LIMIT, bias_std=0.02, **sizes):
    """A tiny GPT-OSS, the same on every call and rank, whose biases are not zero."""
    torch.manual_seed(seed)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SMALL, **sizes})).float()
    for module in model.modules():
        if isinstance(module, gpt_oss.GptOssExperts):
            module.limit = limit
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=bias_std if name.endswith("bias") else 0.02)
    return model


SGD = {"type": "SGD", "params": {"lr": LR}}
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}


def engine_of(model, ep_size, backend="auto", zero=0, algorithm=SGD, bf16=False, **options):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": algorithm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,
        "expert_parallel": {"enabled": True, "autoep_size": ep_size},
        "steps_per_print": 10**9,
        "tile_overlap": {"enabled": True, "backend": backend},
    }
    engine = deepspeed.initialize(model=model, config=config, **options)[0]
    assert sum(isinstance(module, TileGptOssMLP) for module in engine.module.modules()) == 2
    return engine
