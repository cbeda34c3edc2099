"""Checks around ``engine.load_checkpoint``, so that it loads what it should or says, on every rank, what is wrong.

Before anything is loaded the files are looked through. Afterwards each expert's checksum is compared with its file's,
and between the ranks that hold the same expert; ZeRO 1 and 2's own copies are compared with the weights. Optimizer
state loads at the same ``ep_size``, weights at any (``load_module_only=True``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import nn

from .agreement import of_every_rank
from .load_files import Files, unusual_dtypes
from .model_experts import checksum, layers_of

# So many faults are told at once.
MOST_FAULTS = 20
# An optimizer's state that has its parameter's shape.
_LIKE_PARAMETER = "exp_avg", "exp_avg_sq", "momentum_buffer"


class LoadError(RuntimeError):
    """A checkpoint cannot be loaded, or was not loaded as it is; lists the faults that any rank found."""

    def __init__(self, what: str, faults: list[str]):
        faults = list(dict.fromkeys(faults))
        rest = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        super().__init__("\n  ".join([what, *faults[:MOST_FAULTS], *rest]))


@dataclass
class _Loaded:
    """What a rank tells the others after it has loaded.

    Attributes:
        faults: what went wrong.
        sums: (layer, expert, the first of the ranks that hold it) -> checksum.
    """

    faults: list[str] = field(default_factory=list)
    sums: dict[tuple[str, int, int], int] = field(default_factory=dict)


class LoadCheck:
    """Checks one call of ``engine.load_checkpoint``; every rank makes one and calls :meth:`before`, then :meth:`after`.

    Args:
        call: all arguments of ``load_checkpoint``.
    """

    def __init__(self, engine: DeepSpeedEngine, call: dict[str, Any]):
        self._engine, self._call = engine, call
        self._layers = layers_of(engine.module)
        latest = Path(call["load_dir"]) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        self._tag = call["tag"] or (latest.read_text().strip() if latest.is_file() else None)
        self._folder = Path(call["load_dir"]) / str(self._tag)
        self._is_there = self._tag is not None and self._folder.is_dir()
        self._file_sums: dict[tuple[str, int], int] = {}

    def before(self) -> None:
        """Looks through the files that this rank will load, where they are DeepSpeed's plain ones.

        Only where the caller wants them to match the model: with ``load_module_strict`` and no ``custom_load_fn``.

        Raises:
            LoadError: there is no such tag; a file is missing, extra, unreadable, of another expert or ep_size; or a
                tensor in it is missing, extra, of another shape or dtype, or not finite. Nothing has been loaded.
        """
        files = Files(self._engine, self._folder)
        try:
            self._look_at(files)
        except Exception as error:  # the others wait to hear of it, whatever it is
            files.faults.append(_words_of(error))
        told = of_every_rank((self._is_there, files.faults, files.dtypes))
        absent = [rank for rank, (is_there, *_) in enumerate(told) if not is_there]
        faults = [f"ranks {absent}: no such folder, which other ranks have"] if 0 < len(absent) < len(told) else []
        # Without a tag DeepSpeed says so and loads nothing; of one that is nowhere it says nothing.
        if len(absent) == len(told) and self._tag is not None and self._has_plain_files():
            faults = [f"there is no tag '{self._tag}'; tags that are there: {self._tags()}"]
        faults += [fault for _, found, _ in told for fault in found]
        faults += unusual_dtypes([dtypes for *_, dtypes in told])
        if faults:
            raise LoadError(f"the checkpoint {self._folder} cannot be loaded; nothing was:", faults)
        self._file_sums = files.sums

    def after(self, failure: Exception | None) -> None:
        """Compares what was loaded with the files, and between ranks.

        Args:
            failure: what ``load_checkpoint`` raised on this rank.

        Raises:
            Exception: ``failure``.
            LoadError: another rank failed; an expert differs from its file or between the ranks that hold it; or a
                parameter differs from the optimizer's own copy of it, or in shape from its state.
        """
        if failure is not None and self._loads_together():
            raise failure  # The others wait for this rank, but in an exchange of DeepSpeed's.
        everyone = of_every_rank(self._loaded() if failure is None else _Loaded([_words_of(failure)]))
        if failure is not None:
            raise failure
        faults = [f"rank {rank}: {fault}" for rank, other in enumerate(everyone) for fault in other.faults]
        faults += _unlike_replicas(everyone)
        if faults:
            raise LoadError(f"the checkpoint {self._folder} was not loaded as it is:", faults)

    def _look_at(self, files: Files) -> None:
        if self._is_there and self._is_plain():
            files.look_at_model(self._layers)
            if self._loads_optimizer():
                files.look_at_optimizer()

    def _loaded(self) -> _Loaded:
        try:
            sums, engine = self._sums(), self._engine
            copies, shapes = _unlike_copies(engine.module), _unlike_shapes(engine.optimizer)
            return _Loaded([*self._unlike_files(sums), *copies, *shapes], sums)
        except Exception as error:  # as above
            return _Loaded([_words_of(error)])

    def _is_plain(self) -> bool:
        is_as_model = self._call["load_module_strict"] and self._call["custom_load_fn"] is None
        return is_as_model and self._has_plain_files() and not self._engine.load_universal_checkpoint()

    def _has_plain_files(self) -> bool:
        return type(self._engine.checkpoint_engine) is TorchCheckpointEngine

    def _tags(self) -> str:
        files = Path(self._call["load_dir"]).glob("*/*model_states.pt")
        return ", ".join(sorted({file.parent.name for file in files})) or "none"

    def _loads_together(self) -> bool:
        """Whether ranks exchange something while they load."""
        return self._engine.zero_optimization_partition_weights() or isinstance(self._engine.optimizer, BF16_Optimizer)

    def _loads_optimizer(self) -> bool:
        """Whether the optimizer's files are read: of ZeRO-3 always, which has the experts there."""
        is_asked = self._call["load_optimizer_states"] and not self._call["load_module_only"]
        engine = self._engine
        return engine.optimizer is not None and (is_asked or engine.zero_optimization_partition_weights())

    def _sums(self) -> dict[tuple[str, int, int], int]:
        """Checksums of this rank's experts; of none that ZeRO-3 has cut, which are nowhere whole."""
        return {
            (layer.name, number, layer.replicas[0]): checksum(tensors.values())
            for layer in self._layers
            for number, tensors in layer.experts().items()
        }

    def _unlike_files(self, sums: dict[tuple[str, int, int], int]) -> Iterator[str]:
        for (layer, number, _), got in sums.items():
            expected = self._file_sums.get((layer, number), got)
            if got != expected:
                yield f"layer '{layer}', expert {number}: got checksum {got:#018x}, its file has {expected:#018x}"


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unlike_replicas(everyone: list[_Loaded]) -> Iterator[str]:
    """What should be the same expert on several ranks, and is not."""
    holders = defaultdict(dict)
    for rank, loaded in enumerate(everyone):
        for expert, value in loaded.sums.items():
            holders[expert].setdefault(value, []).append(rank)
    for (layer, number, _), ranks_of in holders.items():
        if len(ranks_of) > 1:
            found = ", ".join(f"{value:#018x} on ranks {ranks}" for value, ranks in ranks_of.items())
            yield f"layer '{layer}', expert {number}: ranks that hold it differ, got checksums {found}"


def _unlike_copies(model: nn.Module) -> list[str]:
    """Parameters that the next step would take from another state: ZeRO 1 and 2 train copies of their own."""
    unlike = []
    for name, parameter in model.named_parameters():
        copy = getattr(parameter, "_hp_mapping", None)
        if copy is not None and not torch.equal(copy.lp_fragment, copy.hp_fragment.to(copy.lp_fragment)):
            unlike.append(name)
    return [f"the optimizer's own copies of {len(unlike)} parameters differ, first of '{unlike[0]}'"] if unlike else []


def _unlike_shapes(optimizer: Any) -> list[str]:
    """State that torch's optimizers take from another ep_size, and fail with at the next step."""
    shapes = {
        (tuple(value.shape), tuple(parameter.shape)): name
        for parameter, values in getattr(optimizer, "state", {}).items()
        for name, value in (values.items() if isinstance(values, dict) else ())
        if name in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and value.shape != parameter.shape
    }
    return [f"got optimizer state of shape {list(a)} ({name}), expected {list(b)}" for (a, b), name in shapes.items()]
