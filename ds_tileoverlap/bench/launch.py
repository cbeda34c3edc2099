"""The ranks of a benchmark, as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

from ..ranks import command_of

WORKER = f"{__package__}.worker"
# The launcher gives its ranks 30 seconds to end.
END_LIMIT_S = 45


def launch(arguments: list[str], ranks: int, limit_s: float, to_stderr: bool) -> bool:
    """Whether all ranks of ``worker.py`` ended well; they print where this process does, or all to stderr.

    None of them is left, whether they end, take longer than ``limit_s``, or this process is interrupted.
    """
    command = command_of(ranks, WORKER, *arguments)
    # In a session of its own, so that an interrupt reaches its ranks through the launcher alone, and once.
    process = subprocess.Popen(command, stdout=2 if to_stderr else None, start_new_session=True)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"ds-tileoverlap: {ranks} ranks did not end in {limit_s:.0f} s", file=sys.stderr)
        return False
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
            process.kill()
