"""The engine of a model with layers of this package: it checks what it loads, and saves the experts of all ranks.

``save_16bit_model`` and the Trainer's ``save_model`` write them (under ZeRO-3 with
``stage3_gather_16bit_weights_on_model_save``), where DeepSpeed alone writes rank 0's. For DeepSpeed's MoE layers the
file is the state dict of a model with ``ep_size`` 1.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.pipe.engine import PipelineEngine

from . import overlap_group
from .agreement import on_rank_0
from .layer import runtimes_of
from .load_check import LoadCheck
from .log import say
from .whole_model import whole_state_dict


class TileEngine:
    """Methods of ``DeepSpeedEngine`` that look after experts; :func:`adopt` puts them into an engine."""

    @functools.wraps(DeepSpeedEngine.load_checkpoint)
    def load_checkpoint(self, *args: Any, **kwargs: Any):
        call = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(self, *args, **kwargs)
        call.apply_defaults()
        check, failure, found = LoadCheck(self, call.arguments), None, None
        check.before()
        try:
            found = super().load_checkpoint(*args, **kwargs)
        except Exception as error:  # raised again when all ranks know of it
            failure = error
        check.after(failure)
        return found

    @functools.wraps(DeepSpeedEngine.save_checkpoint)
    def save_checkpoint(self, *args: Any, **kwargs: Any):
        overlap_group.check_failures()
        return super().save_checkpoint(*args, **kwargs)

    @functools.wraps(DeepSpeedEngine.save_16bit_model)
    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        path = os.path.join(save_dir, save_filename)
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            say(f"{path}: not saved, as zero_optimization.stage3_gather_16bit_weights_on_model_save is false")
            return False
        state = whole_state_dict(self, exclude_frozen_parameters)
        info = CheckpointCommitInfo(tag=f"global_step{self.global_steps}", save_dir=save_dir, save_latest=False)
        self.checkpoint_engine.create(info)

        def write() -> None:
            self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
            self.checkpoint_engine.save(state, path)

        on_rank_0(write, f"save the model to {path}")
        self.checkpoint_engine.commit(info)
        return True

    @functools.wraps(DeepSpeedEngine._zero3_consolidated_16bit_state_dict)
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        state = whole_state_dict(self, exclude_frozen_parameters)
        return state if dist.get_rank() == 0 else None


def adopt(engine: torch.nn.Module) -> None:
    """Puts :class:`TileEngine`'s methods into the engine, if its model has layers of this package.

    An engine of a pipeline stays as it is: each rank has some of the layers only, and DeepSpeed its own files for them.
    """
    if isinstance(engine, (TileEngine, PipelineEngine)) or not isinstance(engine, DeepSpeedEngine):
        return
    if runtimes_of(engine.module):
        engine.__class__ = _with_methods(type(engine))
        _teach_accelerate()


@functools.cache
def _with_methods(kind: type) -> type:
    return type(f"Tile{kind.__name__}", (TileEngine, kind), {"__module__": __name__})


def _teach_accelerate() -> None:
    """Lets ``Accelerator.get_state_dict``, which transformers' Trainer saves with, ask all ranks."""
    module = sys.modules.get("accelerate.accelerator")
    original = getattr(getattr(module, "Accelerator", None), "get_state_dict", None)
    if original is None or hasattr(original, "tile_overlap"):
        return

    @functools.wraps(original)
    def get_state_dict(self, model, *args: Any, **kwargs: Any):
        if not isinstance(model, TileEngine) or model.zero_optimization_partition_weights():
            return original(self, model, *args, **kwargs)
        try:
            return whole_state_dict(model)
        except ValueError as error:
            say(str(error))  # The Trainer then saves a checkpoint, and gives another reason.
            raise

    get_state_dict.tile_overlap = True
    module.Accelerator.get_state_dict = get_state_dict
