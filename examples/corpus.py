"""Text to train on: files of the user, or what every machine has, the sources of the Python standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

# Not the standard library itself, or not installed everywhere.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
MAX_FILE_BYTES = 64 * 1024  # a few files are generated tables of many hundred KiB
MAX_TOTAL_BYTES = 32 * 1024 * 1024
HELD_OUT_PERCENT = 5

# A file's content -> its tokens, [num_tokens] of an integer type, with the one that ends a text.
Encode = Callable[[bytes], torch.Tensor]


def as_bytes(text: bytes) -> torch.Tensor:
    """uint8, one token a byte; the file ends with a zero byte."""
    return torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, [num_tokens] each."""

    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, step: int, micro_step: int, rank: int, world_size: int, size: int, seq_len: int, seed: int):
        """This rank's windows of a training step, int64 [size, seq_len + 1].

        The result depends on the arguments alone: the step number is the whole state of the data, so a resumed run
        sees what an uninterrupted one would have seen.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + micro_step)
        starts = torch.randint(len(self.train) - seq_len, (world_size, size), generator=generator)[rank]
        return _windows(self.train, starts, seq_len + 1)

    def evaluation(self, num_windows: int, seq_len: int) -> torch.Tensor:
        """Evenly spaced windows of the held-out text, int64 [num_windows, seq_len + 1]; the same on every call."""
        starts = torch.linspace(0, len(self.held_out) - seq_len - 1, num_windows, dtype=torch.float64).long()
        return _windows(self.held_out, starts, seq_len + 1)


def standard_library(encode: Encode = as_bytes) -> Corpus:
    """Reads the corpus. Which files are held out depends on a hash of each file's path, not on what else is there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            is_held_out = int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT
            (held_out if is_held_out else train).append(encode(path.read_bytes()[:MAX_FILE_BYTES]))
    return Corpus(*(torch.cat(part)[:MAX_TOTAL_BYTES] for part in (train, held_out)))


def from_files(paths: Iterable[Path], encode: Encode = as_bytes) -> Corpus:
    """Reads files, and whole folders but for what is hidden; the last part of each file is held out."""
    train, held_out = [], []
    for path in paths:
        for file in [path] if path.is_file() else _visible_files(path):
            tokens = encode(file.read_bytes())
            start = len(tokens) - len(tokens) * HELD_OUT_PERCENT // 100
            train.append(tokens[:start])
            held_out.append(tokens[start:])
    nothing = torch.zeros(0, dtype=torch.uint8)
    return Corpus(torch.cat([nothing, *train]), torch.cat([nothing, *held_out]))


def _visible_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part[0] == "." for part in path.relative_to(folder).parts))


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()
