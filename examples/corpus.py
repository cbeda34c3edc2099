"""Text that every machine has: the sources of the Python standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Not the standard library itself, or not installed everywhere.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
MAX_FILE_BYTES = 64 * 1024  # a few files are generated tables of many hundred KiB
MAX_TOTAL_BYTES = 32 * 1024 * 1024
HELD_OUT_PERCENT = 5


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, from different files: uint8 [num_bytes] each, files end with a zero byte."""

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


def standard_library() -> Corpus:
    """Reads the corpus. Which files are held out depends on a hash of each file's path, not on what else is there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {"train": bytearray(), "held_out": bytearray()}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            held_out = int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT
            parts["held_out" if held_out else "train"] += path.read_bytes()[:MAX_FILE_BYTES] + b"\0"
    return Corpus(*(torch.frombuffer(part[:MAX_TOTAL_BYTES], dtype=torch.uint8) for part in parts.values()))


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()
