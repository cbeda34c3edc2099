"""Where DeepSpeed keeps experts: what their tensors are called in a model with its MoE layers, and their files."""

from __future__ import annotations

import re

# In a MoE module; the expert's number and its tensor's own name follow.
EXPERTS = "deepspeed_moe.experts.deepspeed_experts"
EXPERT_TENSOR = re.compile(rf"(?P<layer>.+)\.{re.escape(EXPERTS)}\.(?P<expert>\d+)\.(?P<name>.+)")
# The file of all else, without tensor parallelism, and that of an expert, by the number of its layer.
MODEL_STATES = "mp_rank_00_model_states.pt"
EXPERT_STATES = "layer_{layer}_expert_{expert}_" + MODEL_STATES
# The third group is the name of the file of all else.
EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_(mp_rank_\d+_model_states\.pt)")


def tensor_name(layer: str, expert: int, name: str) -> str:
    """What :data:`EXPERT_TENSOR` takes apart."""
    return f"{layer}.{EXPERTS}.{expert}.{name}"
