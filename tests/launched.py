"""Programs as users start them: in a process group of their own, on CPU, with a wall limit."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def launcher():
    """The ``deepspeed`` launcher for two ranks."""
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]


def run(command, limit_s, cwd=None, path=(ROOT,), **environment):
    """Exit code of a command and everything that it and its ranks printed.

    Args:
        path: folders that its Python finds modules in.
        environment: variables that it has besides those of this process.
    """
    folders = os.pathsep.join(filter(None, [*map(str, path), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": folders, **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher and its ranks
        _free_shared_memory(command)
    return process.returncode, output


def _free_shared_memory(command):
    """Removes what DeepSpeed's exchange on CPUs leaves in memory when a job ends, 64 MiB a rank."""
    if "--master_port" in command:
        port = command[command.index("--master_port") + 1]
        for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
            left.unlink()
