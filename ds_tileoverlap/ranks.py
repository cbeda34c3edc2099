"""Ranks on this machine: started, and none of them left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# The launcher gives its ranks 30 seconds to end.
END_LIMIT_S = 45.0
# Each rank has a session of its own; the value of this variable is what they and the launcher have in common.
MARK = "DS_TILEOVERLAP_RANKS"


@contextmanager
def running(
    num_ranks: int,
    module: str,
    *arguments: str,
    limit_s: float,
    stdout: int | None = None,
    stderr: int | IO | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The launcher of so many ranks that run a module; leaving waits for their end.

    None of them is left, whether they end, take longer than ``limit_s``, or this process fails or is interrupted.

    Args:
        stdout, stderr: of the launcher and its ranks, as of ``subprocess.Popen``.

    Raises:
        TimeoutError: they took longer.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    mark, is_late = uuid.uuid4().hex, threading.Event()
    # In a session of its own, so that an interrupt reaches its ranks through the launcher alone, and once.
    options = dict(env={**os.environ, MARK: mark}, start_new_session=True, text=True, errors="replace")

    def end_late() -> None:
        is_late.set()
        _end(launcher, mark)

    limit = threading.Timer(limit_s, end_late)
    with subprocess.Popen([*command, "-m", module, *arguments], stdout=stdout, stderr=stderr, **options) as launcher:
        try:
            limit.start()
            yield launcher
            launcher.wait()
        finally:
            limit.cancel()
            _end(launcher, mark)
    if is_late.is_set():
        raise TimeoutError(f"{num_ranks} ranks did not end in {limit_s:.0f} s")


def last_words(log: str) -> str:
    """The first error that a rank raised; what its peers and the launcher say follows from it."""
    found = re.search(r"^(?:\[rank\d+\]: *)?((?!.*ChildFailedError)[\w.]*Error\b.*)", log, re.M)
    return found[1].strip() if found else "no message"


def _end(launcher: subprocess.Popen, mark: str) -> None:
    """Tells the launcher to end its ranks; what is left then, or when this is interrupted, is killed."""
    launcher.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(END_LIMIT_S)
    finally:
        launcher.kill()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
