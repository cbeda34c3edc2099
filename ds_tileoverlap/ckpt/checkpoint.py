"""The two kinds of checkpoint folders: the tensors they hold, by MoE layer and expert, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..arguments import UsageError
from ..expert_names import EXPERT_FILE, EXPERT_STATES, EXPERT_TENSOR, MODEL_STATES, tensor_name
from .files import Entry, entries_of, load

DEEPSPEED, HF = "deepspeed", "hf"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# What families call the number of experts in config.json.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_HF_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")


@dataclass
class MoELayer:
    """The experts of one layer.

    Attributes:
        num_experts: how many experts there have to be.
        place: where an expert is, with ``{expert}`` for its number: a file, or a folder and the beginning of its names.
        prefix: the name of the MoE module in the model.
        experts: number -> name within the expert -> tensor; none where its file has told nothing, a fault of its own.
    """

    num_experts: int
    place: str
    prefix: str = ""
    experts: dict[int, dict[str, Entry]] = field(default_factory=dict)

    def where(self, expert: int) -> str:
        return self.place.replace("{expert}", str(expert))

    def missing(self) -> list[int]:
        return sorted(set(range(self.num_experts)) - set(self.experts))

    def extra(self) -> list[int]:
        return sorted(set(self.experts) - set(range(self.num_experts)))

    def faults(self, dtypes: dict[str, torch.dtype]) -> Iterator[str]:
        """What distinguishes an expert from most others of this layer, or a tensor of one from ``dtypes``."""
        expected = f"experts 0 to {self.num_experts - 1}" if self.num_experts else "no such layer"
        for expert in self.missing():
            yield f"{self.where(expert)}: missing, expected {expected}"
        for expert in self.extra():
            yield f"{self.where(expert)}: extra, expected {expected}"
        known = {expert: tensors for expert, tensors in sorted(self.experts.items()) if tensors}
        kinds = Counter(frozenset((name, e.shape) for name, e in tensors.items()) for tensors in known.values())
        usual = dict(max(kinds, key=kinds.get, default=()))
        for expert, tensors in known.items():
            for name in sorted(usual.keys() - tensors.keys()):
                yield f"{self.where(expert)}: {name}: missing, expected shape {list(usual[name])} as in other experts"
            for name, entry in tensors.items():
                if name not in usual:
                    yield f"{entry}: extra, expected {', '.join(sorted(usual))} as in other experts"
                elif entry.shape != usual[name]:
                    yield f"{entry}: got shape {list(entry.shape)}, expected {list(usual[name])} as in other experts"
                elif entry.dtype != dtypes[name]:
                    yield f"{entry}: got {entry.dtype}, expected {dtypes[name]} as in other experts"


@dataclass
class Checkpoint:
    """A folder of either kind.

    Attributes:
        facts: what is known beyond tensors: tag, step and optimizer files, or the model type.
        layers: MoE layers, in the model's order.
        others: all other tensors by name.
        config: config.json of a Hugging Face folder.
        faults: what is missing or corrupt as far as names, shapes and dtypes tell; each names file, key, got, expected.
    """

    path: Path
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    layers: list[MoELayer] = field(default_factory=list)
    others: dict[str, Entry] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def tensors(self) -> Iterator[Entry]:
        """All tensors, those of a file one after the other."""
        yield from self.others.values()
        for layer in self.layers:
            for _, tensors in sorted(layer.experts.items()):
                yield from tensors.values()

    def attempt(self, file: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The content of a file; nothing, and a fault, where it cannot be read."""
        if not file.is_file():
            self.faults.append(f"{file}: missing")
            return {}
        try:
            if content := read(file):
                return content
            raise ValueError("it holds nothing")
        except Exception as error:  # a broken file makes its reader raise anything
            why = str(error).strip().partition("\n")[0]
            self.faults.append(f"{file}: cannot be read, it may be truncated: {type(error).__name__}: {why}")
        return {}

    def judge(self) -> Checkpoint:
        """Adds the faults of the layers."""
        seen = defaultdict(Counter)
        for tensors in (tensors for layer in self.layers for tensors in layer.experts.values()):
            for name, entry in tensors.items():
                seen[name][entry.dtype] += 1
        dtypes = {name: counts.most_common(1)[0][0] for name, counts in seen.items()}
        for layer in self.layers:
            self.faults += layer.faults(dtypes)
        return self


def open_checkpoint(path: Path, tag: str | None = None) -> Checkpoint:
    """Looks through a checkpoint folder, without reading the values of its tensors.

    Args:
        path: the folder that ``engine.save_checkpoint`` was given, or one of ``save_pretrained``.
        tag: of a DeepSpeed checkpoint; the one that ``latest`` names by default.

    Raises:
        UsageError: it is no such folder, or holds layers of AutoEP, whose names and files are others.
    """
    if path.is_dir() and (tag is not None or (path / "latest").is_file()):
        return _open_deepspeed(Checkpoint(path, DEEPSPEED), tag).judge()
    if (path / "config.json").is_file():
        return _open_hf(Checkpoint(path, HF)).judge()
    raise UsageError(
        f"{path}: got {'a folder without either' if path.is_dir() else 'no folder'}, expected a folder with the file "
        "'latest' (DeepSpeed; or give --tag) or 'config.json' (Hugging Face)"
    )


def _open_deepspeed(checkpoint: Checkpoint, tag: str | None) -> Checkpoint:
    tag = tag or (checkpoint.path / "latest").read_text(encoding="utf-8", errors="replace").strip()
    folder = checkpoint.path / tag
    checkpoint.facts["tag"] = tag
    if not folder.is_dir():
        tags = ", ".join(sorted(p.parent.name for p in checkpoint.path.glob(f"*/{MODEL_STATES}"))) or "none"
        checkpoint.faults.append(f"{folder}: missing; tags that are there: {tags}")
        return checkpoint
    state = checkpoint.attempt(folder / MODEL_STATES, load)
    checkpoint.facts["step"] = state.get("global_steps")
    checkpoint.facts["optimizer_files"] = sorted(file.name for file in folder.glob("*optim_states.pt"))
    if state.get("ds_autoep_layers"):
        raise UsageError(
            f"{folder / MODEL_STATES}: got a checkpoint of AutoEP's layers, expected one of deepspeed.moe.layer.MoE "
            "(ds_tileoverlap.hf_export.save_pretrained writes a Hugging Face folder from the engine)"
        )
    if state:
        checkpoint.faults += _unsupported(folder, state)
        module = state["module"] if isinstance(state.get("module"), dict) else {}
        checkpoint.others = _tensors(checkpoint, folder / MODEL_STATES, module)
    checkpoint.layers = _deepspeed_layers(checkpoint, folder, state.get("num_experts"))
    return checkpoint


def _unsupported(folder: Path, state: dict[str, Any]) -> Iterator[str]:
    """Kinds of checkpoints whose tensors mean something else than those of this tool."""
    file = folder / MODEL_STATES
    if not isinstance(state.get("module"), dict):
        got = type(state.get("module")).__name__
        yield f"{file}: module: got {got}, expected a state dict (no pipeline parallelism)"
    if not isinstance(state.get("num_experts"), list):
        yield f"{file}: num_experts: got {state.get('num_experts')!r}, expected a list, one number for each MoE layer"
    if shards := sorted(f.name for f in folder.glob("mp_rank_*_model_states.pt") if f.name != MODEL_STATES):
        yield f"{folder}: got {shards[0]}, expected {MODEL_STATES} alone (no tensor parallelism)"


def _tensors(checkpoint: Checkpoint, file: Path, state: dict[str, Any]) -> dict[str, Entry]:
    found = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for key in state.keys() - found.keys():
        checkpoint.faults.append(f"{file}: {key}: got {type(state[key]).__name__}, expected a tensor")
    return {key: Entry(file, key, tuple(value.shape), value.dtype) for key, value in found.items()}


def _deepspeed_layers(checkpoint: Checkpoint, folder: Path, numbers: Any) -> list[MoELayer]:
    """Layers as ``numbers``, the experts of each, and the files tell; only the files where that is no list."""
    files = {
        (int(m[1]), int(m[2])): f
        for f in folder.iterdir()
        if (m := EXPERT_FILE.fullmatch(f.name)) and m[3] == MODEL_STATES
    }
    known = dict(enumerate(numbers)) if isinstance(numbers, list) else {}
    for layer, expert in files:
        known[layer] = known.get(layer, 0) if isinstance(numbers, list) else max(known.get(layer, 0), expert + 1)
    places = {layer: str(folder / EXPERT_STATES.replace("{layer}", str(layer))) for layer in sorted(known)}
    layers = {layer: MoELayer(known[layer], place) for layer, place in places.items()}
    for (layer, expert), file in sorted(files.items()):
        layers[layer].experts[expert] = _expert(checkpoint, layers[layer], expert, file)
    return list(layers.values())


def _expert(checkpoint: Checkpoint, layer: MoELayer, expert: int, file: Path) -> dict[str, Entry]:
    """The tensors of one expert's file; the first one of a layer tells the layer's prefix."""
    tensors = {}
    for key, entry in _tensors(checkpoint, file, checkpoint.attempt(file, load)).items():
        match = EXPERT_TENSOR.fullmatch(key)
        if match and int(match["expert"]) == expert and match["layer"] == (layer.prefix or match["layer"]):
            layer.prefix, tensors[match["name"]] = match["layer"], entry
        else:
            expected = tensor_name(layer.prefix or "<prefix>", expert, "<name>")
            checkpoint.faults.append(f"{entry}: got this key, expected {expected}")
    return tensors


def _open_hf(checkpoint: Checkpoint) -> Checkpoint:
    path = checkpoint.path
    checkpoint.config = checkpoint.attempt(path / "config.json", read_json)
    checkpoint.facts["model_type"] = checkpoint.config.get("model_type")
    weight_map = None
    if (path / INDEX).is_file():
        weight_map = checkpoint.attempt(path / INDEX, lambda file: dict(read_json(file)["weight_map"]))
    files = {WEIGHTS} if weight_map is None else set(weight_map.values())
    found = {name: checkpoint.attempt(path / name, entries_of) for name in sorted(files)}
    for key, name in (weight_map or {}).items():
        if found[name] and key not in found[name]:
            checkpoint.faults.append(f"{path / name}: {key}: missing, expected by {INDEX}")
    layers: dict[str, MoELayer] = {}
    for key, entry in (item for entries in found.values() for item in entries.items()):
        if match := _HF_EXPERT.fullmatch(key):
            prefix, expert, name = match.groups()
            layer = layers.setdefault(prefix, MoELayer(0, f"{path}: {prefix}.experts.{{expert}}", prefix))
            layer.experts.setdefault(int(expert), {})[name] = entry
        else:
            checkpoint.others[key] = entry
    checkpoint.layers = [layers[prefix] for prefix in sorted(layers, key=_numbers_as_such)]
    for layer in checkpoint.layers:
        layer.num_experts = num_experts(checkpoint.config) or max(layer.experts) + 1
    return checkpoint


def num_experts(config: dict[str, Any]) -> int:
    """The experts of a MoE layer that config.json asks for; 0 without any."""
    return next((config[name] for name in NUM_EXPERTS if isinstance(config.get(name), int)), 0)


def read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__}, expected an object")
    return content


def _numbers_as_such(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``layers.10`` after ``layers.9``, as modules come."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
