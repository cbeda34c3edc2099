"""What other programs of this machine say."""

from __future__ import annotations

import subprocess


def printed_by(*command: str, limit_s: float = 20.0, with_errors: bool = False) -> str:
    """What a program prints; nothing where it is missing, fails or does not answer in time.

    Args:
        with_errors: for a reader who wants to know: what it printed although it failed, or why there is nothing.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=not with_errors)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{' '.join(command)}: {error}\n" if with_errors else ""
    return done.stdout + done.stderr if with_errors else done.stdout


def driver_version() -> str:
    """Of NVIDIA's driver; empty without one."""
    return printed_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
