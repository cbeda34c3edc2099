"""A rank of ``ds-tileoverlap trace``: a job of one MoE layer, of which one step is traced as of any other job."""

from __future__ import annotations

import json
import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import distributed as dist
from torch import nn

from .. import MoE, initialize
from ..bench.arms import Gated
from ..config import BLOCK
from ..planning.routing import Shape

WARM_UP_STEPS = 5


class Layer(nn.Module):
    def __init__(self, shape: Shape, num_ranks: int):
        super().__init__()
        self.moe = MoE(
            shape.hidden,
            Gated(shape.hidden, shape.intermediate),
            num_experts=shape.experts,
            ep_size=num_ranks,
            k=shape.top_k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss of tokens [T, H]."""
        y, l_aux, _ = self.moe(x)
        return y.float().square().mean() + 0.01 * l_aux


def main(shape: Shape, block: dict, folder: str) -> None:
    """Trains a few steps on random tokens; the one after the warm-up is traced.

    Args:
        block: the ``tile_overlap`` block of a ds_config.
    """
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        get_accelerator().set_device(rank)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    torch.manual_seed(0)
    with device:
        model = Layer(shape, dist.get_world_size())
    trained = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "zero_allow_untested_optimizer": True,
        # ZeRO lays experts out evenly, as in most jobs.
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        BLOCK: {**block, "enabled": True, "trace": {"step": WARM_UP_STEPS, "folder": folder}},
    }
    engine = initialize(model=model, model_parameters=trained, config=config)[0]
    torch.manual_seed(1 + rank)
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(WARM_UP_STEPS + 1):
        engine.backward(engine(x))
        engine.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Shape(**given["shape"]), given["block"], given["folder"])
