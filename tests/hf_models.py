"""Tiny Hugging Face models of the families that AutoEP knows, and their batches."""

import pytest
import torch
from deepspeed import comm

transformers = pytest.importorskip("transformers")

SMALL = dict(
    hidden_size=32, num_hidden_layers=2, vocab_size=64, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=24, max_position_embeddings=64,
)  # fmt: skip
# So small that the clamped activations of these models clamp.
LIMIT = 0.05


def mixtral():
    config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SMALL)
    return "mixtral", transformers.MixtralForCausalLM(config)


def qwen3_moe(num_experts_per_tok=3, norm_topk_prob=True):
    config = transformers.Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=num_experts_per_tok, moe_intermediate_size=24, norm_topk_prob=norm_topk_prob,
        decoder_sparse_step=1, mlp_only_layers=[], head_dim=8, **SMALL,
    )  # fmt: skip
    return "qwen3_moe", transformers.Qwen3MoeForCausalLM(config)


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        decoder_sparse_step=1, mlp_only_layers=[], **SMALL,
    )  # fmt: skip
    return "qwen3_moe", transformers.Qwen2MoeForCausalLM(config)


def olmoe():
    config = transformers.OlmoeConfig(num_experts=8, num_experts_per_tok=2, **SMALL)
    return None, transformers.OlmoeForCausalLM(config)


# Keys that AutoEP needs for a family; ours fills them in.
KEYS = {
    "qwen2_moe": {"route_norm": False},
    "olmoe": {
        "moe_layer_pattern": r"model\.layers\.\d+\.mlp", "num_experts_attr": "num_experts", "route_norm": False
    },
}  # fmt: skip


def deepseek_v3():
    heads = {"num_key_value_heads": SMALL["num_attention_heads"]}
    config = transformers.DeepseekV3Config(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, **{**SMALL, **heads},
    )  # fmt: skip
    return "deepseek_v3", transformers.DeepseekV3ForCausalLM(config)


def deepseek_v2():
    heads = {"num_key_value_heads": SMALL["num_attention_heads"]}
    config = transformers.DeepseekV2Config(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=4,
        topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, **{**SMALL, **heads},
    )  # fmt: skip
    return "deepseek_v2", transformers.DeepseekV2ForCausalLM(config)


def qwen3_5_moe():
    config = transformers.Qwen3_5MoeTextConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, head_dim=8,
        layer_types=["full_attention"] * SMALL["num_hidden_layers"], **SMALL,
    )  # fmt: skip
    return "qwen3_5_moe", transformers.Qwen3_5MoeForCausalLM(config)


def minimax_m3():
    config = transformers.MiniMaxM3VLTextConfig(
        num_local_experts=4, num_experts_per_tok=2, dense_intermediate_size=24, shared_intermediate_size=24, head_dim=8,
        rotary_dim=4, swiglu_limit=LIMIT, **SMALL,
    )  # fmt: skip
    return "minimax_m3", transformers.MiniMaxM3VLForCausalLM(config)


def qwen3_moe_pre():
    return qwen3_moe(num_experts_per_tok=1, norm_topk_prob=False)


def mixtral_clamped():
    preset, model = mixtral()
    model.config.swiglu_limit = LIMIT
    return preset, model


FAMILIES = (
    mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, qwen3_5_moe, minimax_m3, mixtral_clamped,
    qwen3_moe_pre,
)  # fmt: skip
FAMILIES = {family.__name__: family for family in FAMILIES}
# Keys that make of a family something that transformers does not have.
VARIANTS = {
    "mixtral_clamped": {"expert_activation": "swiglu_clamped"},
    "qwen3_moe_pre": {"score_apply": "pre", "route_norm": False},
}


def model_of(family):
    """The family's tiny model, the same on every call and rank."""
    torch.manual_seed(0)
    preset, model = FAMILIES[family]()
    return preset, model.float()


def batch(step):
    rank = comm.get_rank()
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
