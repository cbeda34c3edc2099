"""From a DeepSpeed MoE checkpoint to a Hugging Face folder and back: all is checked, then written in one pass."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..appearing import appearing
from ..arguments import UsageError
from ..expert_names import EXPERT_STATES, MODEL_STATES
from .checkpoint import HF, INDEX, WEIGHTS, Checkpoint, num_experts, open_checkpoint, read_json
from .files import Entry, write_safetensors
from .names import FAMILIES, Names, with_map
from .planning import Plan

# What may stand beside the weights of a Hugging Face folder.
COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*", "*.model",
)  # fmt: skip


class CheckpointError(ValueError):
    """The source cannot be converted; the message lists its faults, up to 50. Nothing has been written."""

    def __init__(self, source: Path, faults: list[str]):
        rest = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
        super().__init__("\n  ".join([f"{source}: nothing was written, faults: {len(faults)}", *faults[:50], *rest]))


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    config: Path | None = None,
    family: str | None = None,
    name_map: Path | None = None,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    ep_size: int = 1,
) -> None:
    """Writes the model weights of ``source`` as a checkpoint of the other kind, to the new folder ``target``.

    Optimizer state is not carried over. Values are read twice: all are checked before anything is written. The folder
    gets its name when it is complete.

    Args:
        source, target: folders; ``target`` must not exist.
        to: :data:`HF` or :data:`DEEPSPEED`.
        config: the folder of config.json and tokenizer files, for ``HF`` alone.
        family: a key of :data:`FAMILIES`; by default the model type of config.json.
        name_map: a file as of :func:`with_map`.
        tag: of the DeepSpeed checkpoint; by default the source's latest, and ``global_step0`` for a target.
        dtype: of all floating-point weights; by default each keeps its own.
        max_shard_bytes: the largest safetensors file, unless a single tensor is larger.
        ep_size: the expert-parallel size that the checkpoint will be loaded with.

    Raises:
        UsageError: the arguments do not go together, or ``target`` exists.
        CheckpointError: the source is incomplete, corrupt, or no model of the family.
    """
    _check_target(source, target)
    if tag is not None and Path(tag).name != tag:
        raise UsageError(f"--tag: got {tag!r}, expected the name of a folder in the checkpoint")
    checkpoint = open_checkpoint(source, tag if to == HF else None)
    if checkpoint.kind == to:
        raise UsageError(f"{source}: got a checkpoint of kind '{to}', expected the other kind for --to {to}")
    if config is not None and to != HF:
        raise UsageError("--config: got one, expected none for --to deepspeed (the source has its own)")
    settings = _settings(config) if to == HF else checkpoint.config
    names = _names(settings, family, name_map)
    if faults := checkpoint.faults or list(_unsuited(settings, ep_size)):
        raise CheckpointError(source, faults)
    plan = Plan(checkpoint, names, to, settings, dtype)
    if faults := plan.faults or list(plan.unlike_family()) or list(plan.unfit_values()):
        raise CheckpointError(source, faults)
    with appearing(target) as folder:
        folder.mkdir()
        if to == HF:
            _write_hf(folder, plan, max_shard_bytes)
            _write_companions(folder, config, plan)
        else:
            _write_deepspeed(folder, tag or "global_step0", plan, checkpoint)
        _check_target(folder, target)


def _check_target(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise UsageError(f"{target}: exists, expected a new folder (nothing is ever overwritten)")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: got no folder {target.parent}, expected one to put the target into")
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{target}: lies in the source, expected a folder elsewhere")


def _settings(config: Path | None) -> dict[str, Any]:
    if config is None:
        raise UsageError("--config: missing, expected the folder of the model's config.json (needed for --to hf)")
    try:
        return read_json(config / "config.json")
    except (OSError, ValueError) as error:
        raise UsageError(f"--config: {config / 'config.json'}: cannot be read: {error}") from error


def _names(settings: dict[str, Any], family: str | None, name_map: Path | None) -> Names:
    family = family or settings.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"config.json: model_type: got {family!r}, expected one of {known} (or --family)")
    return FAMILIES[family] if name_map is None else with_map(FAMILIES[family], name_map)


def _unsuited(settings: dict[str, Any], ep_size: int) -> Iterator[str]:
    number = num_experts(settings)
    if not number:
        yield "config.json: got no number of experts, expected num_local_experts, num_experts or n_routed_experts"
    if number % ep_size:
        yield f"config.json: got {number} experts, expected a multiple of --ep-size {ep_size}"
    if "quantization_config" in settings:
        yield "config.json: quantization_config: got quantised weights, expected plain ones (dequantise them first)"


def _write_hf(folder: Path, plan: Plan, max_shard_bytes: int) -> None:
    shards = list(_shards(plan.target, max_shard_bytes))
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [WEIGHTS]
    values = plan.values("write", [name for shard in shards for name in shard])
    for file, shard in zip(files, shards):
        write_safetensors(folder / file, shard, (value for _, value in zip(shard, values)))
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards) for name in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": plan.nbytes()}, "weight_map": weight_map})


def _shards(entries: dict[str, Entry], max_bytes: int) -> Iterator[dict[str, Entry]]:
    """``entries`` in parts of a limited size, in their order but for wide dtypes, which come first."""
    shard, size = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize):
        if shard and size + entry.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name], size = entry, size + entry.nbytes
    yield shard


def _write_companions(folder: Path, config: Path, plan: Plan) -> None:
    """config.json, with the dtype of what was written, and the tokenizer's files."""
    settings = dict(plan.config)
    dtype = next(entry.dtype for name, entry in plan.target.items() if re.search(r"\.experts\.0\.", name))
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", settings)
    for pattern in COMPANIONS:
        for file in filter(Path.is_file, config.glob(pattern)):
            shutil.copy(file, folder)


def _write_deepspeed(folder: Path, tag: str, plan: Plan, checkpoint: Checkpoint) -> None:
    """One file for each expert, and one for all else with what ``engine.load_checkpoint`` asks of it."""
    names: dict[str, list[str]] = {MODEL_STATES: []}
    homes = _homes(checkpoint)
    for name, entry in plan.source.items():
        names.setdefault(homes.get(entry, MODEL_STATES), []).append(name)
    values = plan.values("write", [name for group in names.values() for name in group])
    numbers = [layer.num_experts for layer in checkpoint.layers]
    (folder / tag).mkdir()
    for file, group in names.items():
        state = {name: value for name, value in zip(group, values)}
        if file == MODEL_STATES:
            counts = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 0, "skipped_steps": 0}
            state = {"module": state, "num_experts": numbers, "ds_autoep_layers": None, **counts}
        torch.save(state, folder / tag / file)
        del state
    (folder / "latest").write_text(tag, encoding="utf-8")


def _homes(checkpoint: Checkpoint) -> dict[Entry, str]:
    """Tensor of an expert -> its file in a DeepSpeed checkpoint."""
    return {
        entry: EXPERT_STATES.format(layer=i, expert=expert)
        for i, layer in enumerate(checkpoint.layers)
        for expert, tensors in layer.experts.items()
        for entry in tensors.values()
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
