"""What is wrong with the files that ``engine.load_checkpoint`` is about to read on this rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import groups

from .ckpt.checkpoint import DEEPSPEED, Checkpoint
from .ckpt.files import count_nonfinite, load
from .model_experts import Layer, checksum

_EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_\d+_model_states\.pt")
_EXPERT_OPTIMIZER = "expp_rank_*_mp_rank_{:02d}_optim_states.pt"
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

    def have_experts(self) -> bool:
        """Whether there is a file for each expert; ZeRO-3 saves experts in its own."""
        return not self._engine.zero_optimization_partition_weights() or any(map(_numbers, self._folder.iterdir()))

    def look_at_model(self, layers: list[Layer]) -> None:
        state = self._content(self._engine._get_ckpt_name(*self._place))
        # An old checkpoint's files do not tell layers apart; DeepSpeed reads them in another way.
        if state and isinstance(state.get("num_experts"), list):
            for layer in layers:
                for number, tensors in layer.experts().items():
                    self._look_at_expert(layer, number, tensors)
            self.faults += self._extra(layers)

    def look_at_optimizer(self) -> None:
        engine = self._engine
        if engine.zero_elastic_checkpoint():
            return  # Each rank then reads the files of all.
        if engine.zero_optimization():
            file = Path(engine._get_zero_ckpt_name(*self._place))
            old = file.with_name(file.name.replace("_optim_states", "optim_states"))
            state = self._content(old if old.is_file() and not file.is_file() else file, _MODEL_ONLY)
            self.faults += _other_sizes(file, state.get("optimizer_state_dict", {}), engine.optimizer)
            return
        name = groups._get_max_expert_size_name()
        files = list(self._folder.glob(_EXPERT_OPTIMIZER.format(engine.checkpoint_mp_rank)))
        if files and len(files) != (expected := groups._get_expert_parallel_world_size(name)):
            self.faults.append(
                f"{self._folder}: got optimizer state of ep_size {len(files)}, expected {expected} ({_MODEL_ONLY})"
            )
            return
        self._content(
            engine._get_optimizer_ckpt_name(*self._place, groups._get_expert_parallel_rank(name)), _MODEL_ONLY
        )

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


def _numbers(file: Path) -> tuple[int, ...] | None:
    """Layer and expert that a file is of."""
    match = _EXPERT_FILE.fullmatch(file.name)
    return tuple(map(int, match.groups())) if match else None


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    # Only an archive can be mapped into memory; torch's older format is loaded as DeepSpeed loads it.
    return load(file) if is_zip else torch.load(file, map_location="cpu", weights_only=False)


def _unlike(file: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """How an expert's file differs from the expert in the model, and which of its values no weight should have."""
    state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for key in tensors.keys() - state.keys():
        yield f"{file}: {key}: missing, expected shape {list(tensors[key].shape)}"
    for key, value in state.items():
        if key not in tensors:
            yield f"{file}: {key}: extra, expected {', '.join(sorted(tensors))}"
        elif value.shape != tensors[key].shape:
            yield f"{file}: {key}: got shape {list(value.shape)}, expected {list(tensors[key].shape)}"
        elif count := count_nonfinite(value):
            yield f"{file}: {key}: got {count} NaN or inf, expected finite values"


def _other_sizes(file: Path, state: dict[str, Any], optimizer: Any) -> Iterator[str]:
    """What DeepSpeed would cut or fill up: this rank's share of ZeRO's own copies, of other parameters than now."""
    saved = state.get("single_partition_of_fp32_groups")
    if isinstance(saved, list) and hasattr(optimizer, "_get_groups_without_padding"):
        own = optimizer._get_groups_without_padding(optimizer.single_partition_of_fp32_groups)
        got, expected = ([group.numel() for group in groups] for groups in (saved, own))
        if got != expected:
            yield f"{file}: got optimizer state of {got} parameters in its groups, expected {expected} ({_MODEL_ONLY})"
