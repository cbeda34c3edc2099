"""What is wrong with the files that ``engine.load_checkpoint`` is about to read on this rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, PARAM_ALIGNMENT_PADDINGS, SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.utils import groups

from .ckpt.checkpoint import DEEPSPEED, Checkpoint
from .ckpt.files import count_nonfinite, load
from .expert_names import EXPERT_FILE
from .model_experts import Layer, checksum

# ZeRO's own copies of the weights, by stage.
_COPIES = SINGLE_PARTITION_OF_FP32_GROUPS, FP32_FLAT_GROUPS
_MODEL_ONLY = "weights alone load at any ep_size and number of ranks: load_module_only=True"


class Files:
    """A checkpoint's files as one rank reads them, for an engine that wants them to match its model.

    Attributes:
        faults: what is missing, extra, unreadable, of another expert, shape or ep_size, or not finite.
        sums: (layer, expert) -> checksum of what its file holds, in the model's dtype.
        dtypes: (tensor within an expert, dtype) -> how often, and where first.
    """

    def __init__(self, engine: DeepSpeedEngine, folder: Path):
        self._engine, self._folder = engine, folder
        self._place = str(folder.parent), folder.name
        self._checkpoint = Checkpoint(folder, DEEPSPEED)
        self.faults = self._checkpoint.faults
        self.sums: dict[tuple[str, int], int] = {}
        self.dtypes: dict[tuple[str, torch.dtype], list] = {}

    def look_at_model(self, layers: list[Layer]) -> None:
        file = self._engine._get_ckpt_name(*self._place)
        if not (state := self._content(file)):
            return
        parameters = {name for name, _ in self._engine.module.named_parameters()}
        module = state["module"] if isinstance(state.get("module"), dict) else {}
        self.faults += _not_finite(file, {name: value for name, value in module.items() if name in parameters})
        if self._engine.zero_optimization_partition_weights():
            self.faults += _other_experts(file, state.get("ds_autoep_layers") or [], layers)
        # An old checkpoint's files do not tell layers apart; DeepSpeed reads them in another way.
        elif isinstance(state.get("num_experts"), list):
            for layer in layers:
                for number, tensors in layer.experts().items():
                    self._look_at_expert(layer, number, tensors)
            self.faults += self._extra(layers)

    def look_at_optimizer(self) -> None:
        engine = self._engine
        if engine.zero_elastic_checkpoint():
            return  # Each rank then reads the files of all.
        if not engine.zero_optimization():
            self._look_at_expert_optimizer(engine)
            return
        file = Path(engine._get_zero_ckpt_name(*self._place))
        old = file.with_name(file.name.replace("_optim_states", "optim_states"))
        file = old if old.is_file() and not file.is_file() else file
        hint = "" if engine.zero_optimization_partition_weights() else _MODEL_ONLY
        state = self._content(file, hint).get("optimizer_state_dict", {})
        for name in _COPIES:
            groups_of = state.get(name) if isinstance(state.get(name), list) else []
            self.faults += _not_finite(file, {f"{name}[{i}]": value for i, value in enumerate(groups_of)})
        self.faults += _other_parameters(file, state, engine.optimizer)

    def _look_at_expert_optimizer(self, engine: DeepSpeedEngine) -> None:
        """Without ZeRO there is one file for each rank of the largest expert-parallel group."""
        name = groups._get_max_expert_size_name()
        files = list(self._folder.glob(f"expp_rank_*_mp_rank_{engine.checkpoint_mp_rank:02d}_optim_states.pt"))
        expected = groups._get_expert_parallel_world_size(name)
        if files and len(files) != expected:
            got = f"got optimizer state of ep_size {len(files)}"
            self.faults.append(f"{self._folder}: {got}, expected {expected} ({_MODEL_ONLY})")
            return
        rank = groups._get_expert_parallel_rank(name)
        self._content(engine._get_optimizer_ckpt_name(*self._place, rank), _MODEL_ONLY)

    def _content(self, file: str | Path, hint: str = "") -> dict[str, Any]:
        known = len(self.faults)
        content = self._checkpoint.attempt(Path(file), _read)
        if hint and len(self.faults) > known:
            self.faults[-1] += f" ({hint})"
        return content

    def _look_at_expert(self, layer: Layer, number: int, tensors: dict[str, torch.Tensor]) -> None:
        mp_rank = self._engine.checkpoint_mp_rank
        load_dir, tag = self._place
        file = self._engine._get_expert_ckpt_name(load_dir, layer.index, number, tag, checkpoint_mp_rank=mp_rank)
        state = self._content(file, f"layer '{layer.name}'")
        if not state:
            return
        faults = list(_unlike(file, state, tensors))
        self.faults += faults
        if not faults:
            self.sums[layer.name, number] = checksum(state[key].to(value.dtype) for key, value in tensors.items())
        for key in tensors.keys() & state.keys():
            kind = re.sub(rf"\.{number}\b", "", key.removeprefix(layer.name), count=1), state[key].dtype
            self.dtypes.setdefault(kind, [0, f"{file}: {key}"])[0] += 1

    def _extra(self, layers: list[Layer]) -> Iterator[str]:
        counts = [layer.module.num_experts for layer in layers]
        for file in sorted(self._folder.iterdir()):
            layer, expert = _numbers(file) or (0, 0)
            if layer >= len(counts):
                yield f"{file}: extra, expected {len(counts)} MoE layers"
            elif expert >= counts[layer]:
                yield f"{file}: extra, expected experts 0 to {counts[layer] - 1}"


def unusual_dtypes(every_rank: list[dict[tuple[str, torch.dtype], list]]) -> list[str]:
    """A fault for each tensor of an expert that has another dtype than in most experts of all ranks."""
    counts, places = {}, {}
    for dtypes in every_rank:
        for (name, dtype), (count, place) in dtypes.items():
            counts.setdefault(name, Counter())[dtype] += count
            places.setdefault((name, dtype), place)
    usual = {name: found.most_common(1)[0][0] for name, found in counts.items()}
    return [
        f"{place}: got {dtype}, expected {usual[name]} as in other experts"
        for (name, dtype), place in places.items()
        if dtype != usual[name]
    ]


def _numbers(file: Path) -> tuple[int, int] | None:
    """Layer and expert that a file is of."""
    match = EXPERT_FILE.fullmatch(file.name)
    return (int(match[1]), int(match[2])) if match else None


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    # Only an archive can be mapped into memory; torch's older format is loaded as DeepSpeed loads it.
    return load(file) if is_zip else torch.load(file, map_location="cpu", weights_only=False)


def _unlike(file: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """How an expert's file differs from the expert in the model, and what no weight should be."""
    state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for key in tensors.keys() - state.keys():
        yield f"{file}: {key}: missing, expected shape {list(tensors[key].shape)}"
    for key, value in state.items():
        if key not in tensors:
            yield f"{file}: {key}: extra, expected {', '.join(sorted(tensors))}"
        elif value.shape != tensors[key].shape:
            yield f"{file}: {key}: got shape {list(value.shape)}, expected {list(tensors[key].shape)}"
    yield from _not_finite(file, state)


def _not_finite(file: str | Path, tensors: dict[str, Any]) -> Iterator[str]:
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor) and (count := count_nonfinite(value)):
            yield f"{file}: {key}: got {count} NaN or inf, expected finite values"


def _other_experts(file: str, entries: list[dict[str, Any]], layers: list[Layer]) -> Iterator[str]:
    """Layers whose experts, which ZeRO-3 has cut, are not those that this rank holds."""
    for entry, layer in zip(entries, layers):
        got = range(entry["global_expert_start"], entry["global_expert_end"])
        expected = range(layer.first, layer.first + layer.module.num_local_experts)
        if got != expected:
            yield f"{file}: layer '{layer.name}': got experts {[*got]}, expected {[*expected]} on this rank"


def _other_parameters(file: Path, state: dict[str, Any], optimizer: Any) -> Iterator[str]:
    """Whether ZeRO's state is of other parameters than this rank's; as many values, it may be, of another ep_size."""
    saved, own = state.get(PARAM_ALIGNMENT_PADDINGS), getattr(optimizer, "round_robin_bit16_padding", None)
    if None not in (saved, own) and saved != own:
        got, expected = (sum(map(len, groups)) for groups in (saved, own))
        yield f"{file}: got optimizer state of {got} parameters, expected this rank's {expected} ({_MODEL_ONLY})"
