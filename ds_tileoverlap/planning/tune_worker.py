"""A rank of ``ds-tileoverlap tune``. Rank 0 prints a JSON object for the link and each layer, or why there is none."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable

import deepspeed
import torch
from torch import distributed as dist

from .. import overlap_group
from ..bench.measure import copy_speed, environment
from ..bench.shapes import StageShape
from ..bench.stages import Stages
from ..config import TileOverlapConfig
from ..exchange import peers_of
from ..overlap_stages import Operand
from ..symmetric_layout import choose_returns

# What is tried beside what ``auto`` takes without a profile.
COMM_SMS = (0, 8, 16)
SEGMENTS_BYTES = (2**20, 2**21, 2**22)
SAMPLES = 4


def main() -> int:
    parser = argparse.ArgumentParser(description="a rank of ds-tileoverlap tune")
    parser.add_argument("--layers", type=json.loads, required=True, help="shapes as of the stage benchmark, as JSON")
    parser.add_argument("--limit", type=float, required=True, help="seconds after which no other layer is begun")
    parser.add_argument("--end", type=float, required=True, help="seconds after which this process ends")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.end, exit=True)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # The other ranks wait for this one to come, and leave their GPUs alone.
    link_gbs = _link_gbs(int(os.environ["WORLD_SIZE"])) if rank == 0 else 0.0
    deepspeed.init_distributed("nccl", verbose=False)
    group = overlap_group.group_of(peers_of(dist.group.WORLD, device, None, "tune"), device, profile="none")
    if rank == 0:
        print(json.dumps({"refusal": group.reason} if group.op is None else {"link_gbs": link_gbs}), flush=True)
    if group.op is not None:
        _time_layers(arguments.layers, arguments.limit, device)
    dist.destroy_process_group()
    return 0


def _link_gbs(num_gpus: int) -> float:
    found = min(copy_speed(i, (i + 1) % num_gpus) for i in range(num_gpus))
    torch.cuda.empty_cache()
    return found


def _time_layers(layers: list[dict], limit_s: float, device: torch.device) -> None:
    began = time.monotonic()
    for layer in layers:
        in_time = torch.tensor([time.monotonic() - began < limit_s], device=device)
        dist.broadcast(in_time, 0)
        if not in_time.item():
            return
        # The host is timed too: what it needs decides for small layers.
        record = {
            "shape": layer,
            "ranks": dist.get_world_size(),
            "environment": environment(device, "ds-tileoverlap tune"),
            **StagesWithSegments(StageShape(**layer), device).record(COMM_SMS, SAMPLES, launch=True),
        }
        if dist.get_rank() == 0:
            print(json.dumps({"record": record}), flush=True)
        torch.cuda.empty_cache()


class StagesWithSegments(Stages):
    """The stages with one more kind of arm: rows that return in segments of other sizes."""

    def return_only_arms(self, operand: Operand, rows: torch.Tensor, comm_sms: tuple[int, ...]) -> dict[str, Callable]:
        arms, plan = super().return_only_arms(operand, rows, comm_sms), self.plan_of("rows")
        config = TileOverlapConfig(combine="rows")
        for num_bytes in SEGMENTS_BYTES:
            returns = choose_returns(config, plan.tally, self.width * 2, num_bytes)
            arms[f"segments {num_bytes}"] = self.return_only(plan.but(returns=returns), operand, rows)
        return arms


if __name__ == "__main__":
    sys.exit(main())
