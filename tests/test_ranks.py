"""Ranks of this machine: however their run goes, none of their processes is left."""

import os
import signal
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from ds_tileoverlap import ranks

ASLEEP = "import os, signal, time\nos.write(1, b'%d\\n' % os.getpid())\n{}\ntime.sleep(600)\n"


@pytest.fixture
def asleep(tmp_path, monkeypatch):
    """``asleep(statement)``: a module that prints its process and does not end in time."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def module(statement=""):
        (tmp_path / "asleep.py").write_text(ASLEEP.format(statement))
        return "asleep"

    return module


def is_left(pid):
    """Whether there is such a process, other than one that has ended and that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_none_is_left(pids, num_ranks):
    assert len(pids) == num_ranks
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if is_left(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_rank_that_sleeps_past_the_limit(asleep):
    with pytest.raises(TimeoutError, match="2 ranks did not end in 10 s"):
        with ranks.running(2, asleep(), limit_s=10, stdout=PIPE) as launcher:
            pids = [int(launcher.stdout.readline()) for _ in range(2)]
    check_none_is_left(pids, 2)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("deaf", [False, True], ids=["", "deaf"])
def test_an_error_and_an_interrupt(asleep, monkeypatch, kind, deaf):
    """Deaf ranks outlast the time that the launcher has to end them."""
    if deaf:
        monkeypatch.setattr(ranks, "END_LIMIT_S", 1.0)
    module = asleep("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.write(1, b'deaf\\n')" if deaf else "")
    with pytest.raises(kind), ranks.running(1, module, limit_s=120, stdout=PIPE) as launcher:
        pids = [int(launcher.stdout.readline())]
        assert not deaf or launcher.stdout.readline() == "deaf\n"
        raise kind
    check_none_is_left(pids, 1)


def test_a_launcher_that_dies(asleep):
    module = asleep("os.kill(os.getppid(), signal.SIGKILL)")
    with ranks.running(1, module, limit_s=120, stdout=PIPE) as launcher:
        pids = [int(launcher.stdout.readline())]
    assert launcher.returncode == -signal.SIGKILL
    check_none_is_left(pids, 1)
