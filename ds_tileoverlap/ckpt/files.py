"""Files of tensors, of ``torch.save`` and of safetensors: what is in them, and their values one file at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

# safetensors' names of dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, without its values."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


class _Unknown(dict):
    """Stands in for an object whose class is not torch's: a ds_config, a loss scaler, whatever the job has added."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Unknown:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass

    __hash__ = object.__hash__


def load(file: Path) -> dict[str, Any]:
    """What ``torch.save`` has written, mapped into memory; no code that the file names is run."""
    unknown = get_unsafe_globals_in_checkpoint(file)
    try:
        with safe_globals([(_Unknown, name) for name in unknown]):
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError as error:  # torch's words advise to run what the file names; its reason stands behind them
        raise ValueError(str(error.__context__ or error)) from None
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__}, expected a dictionary")
    return content


def entries_of(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name."""
    with safe_open(file, "pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # it is no dictionary
        return {key: Entry(file, key, tuple(s.get_shape()), DTYPES[s.get_dtype()]) for key, s in slices.items()}


def read(entries: Iterable[Entry]) -> Iterator[torch.Tensor]:
    """The values of ``entries`` in their order, mapped into memory; one file is open at a time."""
    for file, group in groupby(entries, key=lambda entry: entry.file):
        yield from map(_values_of(file), (entry.key for entry in group))


def _values_of(file: Path) -> Callable[[str], torch.Tensor]:
    if file.suffix == ".safetensors":
        return safe_open(file, "pt").get_tensor
    state = load(file)
    return state.get("module", state).__getitem__


def count_nonfinite(value: torch.Tensor) -> int:
    """NaN and inf in ``value``."""
    if not value.is_floating_point():
        return 0
    value = value.float() if value.dtype.itemsize == 1 else value
    # One such value makes the sum so; where the sum alone overflows, they are counted, too.
    if value.sum(dtype=torch.promote_types(value.dtype, torch.float32)).isfinite():
        return 0
    return value.numel() - int(value.isfinite().sum())


def write_safetensors(file: Path, entries: dict[str, Entry], values: Iterable[torch.Tensor]) -> None:
    """Writes ``values``, one after the other, under the names, shapes and dtypes of ``entries``.

    The library's own writer wants all tensors of a file at once; this one holds one. Readers want values aligned: let
    wider dtypes come first.
    """
    names, header, end = {dtype: name for name, dtype in DTYPES.items()}, {"__metadata__": {"format": "pt"}}, 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        header[name] = {"dtype": names[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            stream.write(value.contiguous().reshape(-1).view(torch.uint8).numpy())
