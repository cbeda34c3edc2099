"""Ways in: convert a model's MoE modules when ds_config says so, at ``initialize`` or without any code change."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.moe import layer as deepspeed_layer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from . import engine, versions
from .config import BLOCK, TileOverlapConfig, parse
from .layer import MoE, TileMOELayer, adopt, refusal, release, runtimes_of
from .log import say

if TYPE_CHECKING:
    from .gpt_oss import Conversion

_deepspeed_initialize = deepspeed.initialize


@functools.wraps(_deepspeed_initialize)
def initialize(*args: Any, **kwargs: Any):
    """``deepspeed.initialize``, which also runs the model's MoE layers on this package if ds_config says so.

    Same arguments and results. With a ``"tile_overlap"`` block whose ``enabled`` is true every
    ``deepspeed.moe.layer.MoE`` of the model, every layer that DeepSpeed's AutoEP makes of a Hugging Face model, and
    every MLP block of GPT-OSS, which AutoEP does not know, is converted in place; with ``enabled`` false each one runs
    as DeepSpeed made it; without the block, layers built with :class:`ds_tileoverlap.MoE` run on this package, others
    do not.

    Raises:
        ConfigError: the block is wrong; lists every fault.
        ValueError: a MoE layer is of a kind that cannot be converted; lists every such layer.
        ImportError: AutoEP is asked for, with a version of transformers that this was not tested with.
    """
    call = inspect.signature(_deepspeed_initialize).bind(*args, **kwargs).arguments
    model, ds_config = call.get("model"), _ds_config(call)
    if model is None or ds_config is None:
        return _deepspeed_initialize(*args, **kwargs)
    configure(model, ds_config)
    result = _started(call, model, ds_config)
    engine.adopt(result[0])
    config = parse(ds_config)
    if config is not None and config.enabled:
        _say_if_none(result[0])
        _watch(result[0], config)
    return result


def _started(call: dict[str, Any], model: torch.nn.Module, ds_config: dict[str, Any]) -> tuple:
    """What ``deepspeed.initialize`` returns, with the layers that AutoEP makes, or would make, converted."""
    if not _has_autoep(ds_config):
        return _deepspeed_initialize(**call)
    versions.check_transformers()
    from . import autoep, gpt_oss  # transformers and DeepSpeed's private modules, for those alone who use AutoEP

    if gpt_oss.is_gpt_oss(model):
        _convert_gpt_oss(gpt_oss.Conversion(ds_config, call), ds_config)
        return _deepspeed_initialize(**_with_config(call, {**ds_config, "expert_parallel": {"enabled": False}}))
    result = _deepspeed_initialize(**_with_config(call, autoep.completed(ds_config, model)))
    _convert(autoep.autoep_layers(result[0].module), parse(ds_config), autoep.refusal, autoep.adopt, "AutoEP")
    return result


def configure(model: torch.nn.Module, ds_config: dict[str, Any]) -> int:
    """Applies the ``tile_overlap`` block of ``ds_config`` to the MoE layers of ``model``, in place.

    Parameters keep their identity, order and names, so an optimizer may exist already. Safe to call again.

    Returns:
        The number of layers that run on this package.

    Raises:
        ConfigError, ValueError: see :func:`initialize`. The model is then unchanged.
    """
    config = parse(ds_config)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, deepspeed_layer.MoE)}
    # A block that this package built itself stays as it is.
    layers = {name: module for name, module in layers.items() if not hasattr(module, "tile_overlap")}
    if config is None:
        config, layers = TileOverlapConfig(enabled=True), {n: m for n, m in layers.items() if isinstance(m, MoE)}
    if not config.enabled:
        if any(type(layer.deepspeed_moe) is TileMOELayer for layer in layers.values()):
            say(f"off by {BLOCK}.enabled; {len(layers)} MoE layers run as DeepSpeed's own")
        for layer in layers.values():
            release(layer)
        return 0
    _convert(layers, config, refusal, adopt, "MoE")
    return len(layers)


def _say_if_none(engine: Any) -> None:
    # A rank of a pipeline has some of the layers only, which need not be MoE layers.
    if not runtimes_of(engine.module) and not isinstance(engine, PipelineEngine):
        hint = 'a Hugging Face model needs "expert_parallel" in ds_config'
        say(f"enabled, but the model has no MoE layer to convert ({hint})")


def _watch(engine: Any, config: TileOverlapConfig) -> None:
    if config.log_every or config.trace:
        from .training_log import Watch  # what draws and writes, for those alone who ask for it

        Watch(engine, config)


def _has_autoep(ds_config: dict[str, Any]) -> bool:
    """Whether layers that AutoEP makes shall run on this package."""
    config, block = parse(ds_config), ds_config.get("expert_parallel")
    return config is not None and config.enabled and isinstance(block, dict) and bool(block.get("enabled"))


def _convert_gpt_oss(conversion: Conversion, ds_config: dict[str, Any]) -> None:
    _convert(conversion.layers(), parse(ds_config), conversion.refusal, conversion.adopt, "GPT-OSS")
    conversion.follow()


def _convert(layers: dict[str, Any], config: TileOverlapConfig, refusal: Callable, adopt: Callable, kind: str) -> None:
    """Converts all of the layers, by name, or none where any of them is refused."""
    reasons = [f"'{name}': {reason}" for name, layer in layers.items() if (reason := refusal(layer))]
    if reasons:
        raise ValueError("tile_overlap cannot run these MoE layers:\n  " + "\n  ".join(reasons))
    for name, layer in layers.items():
        adopt(layer, config, name)
    if layers:
        say(f"{len(layers)} {kind} layers on backend {_chosen(config)}")


def install() -> None:
    """Puts :func:`initialize` into the place of ``deepspeed.initialize``, in every module that has it.

    A program may have said ``from deepspeed import initialize`` before it imports this package.
    """
    modules = [module for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    for names in (vars(module) for module in modules if module.__name__ != __name__):
        names.update({name: initialize for name, value in [*names.items()] if value is _deepspeed_initialize})


def _chosen(config: TileOverlapConfig) -> str:
    if config.backend == "auto":
        return "'auto' (overlap where the expert-parallel group can, elsewhere sequential)"
    return f"'{config.backend}' (as configured)"


def _with_config(call: dict[str, Any], ds_config: dict[str, Any]) -> dict[str, Any]:
    """The call with another configuration, wherever the first one stood."""
    call = {**call, "config": ds_config}
    call.pop("config_params", None)
    if getattr(call.get("args"), "deepspeed_config", None) is not None:
        call["args"] = copy.copy(call["args"])
        call["args"].deepspeed_config = None
    return call


def _ds_config(call: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration that ``deepspeed.initialize`` will use, from wherever it may stand."""
    config = call.get("config") or call.get("config_params")
    config = (
        config
        or getattr(call.get("args"), "deepspeed_config", None)
        or getattr(call.get("args"), "deepscale_config", None)
    )
    return config if config is None or isinstance(config, dict) else load_ds_config(config)
