"""Several ranks as processes, kept alive between tests; every call has a wall limit, and stacks when it expires."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message holds what every rank said."""


class Ranks:
    """``world_size`` processes in one process group (gloo on CPU, NCCL on GPUs).

    ``ranks(function, *args)`` calls a module-level ``function(*args)`` on every rank at once and returns the results by
    rank. Any failure ends the processes; the next call starts new ones.
    """

    def __init__(self, world_size: int, device: str = "cpu", timeout_s: float = 60.0):
        self.world_size, self.device, self.timeout_s = world_size, device, timeout_s
        self._processes = []

    def __call__(self, function, *args, limit_s: float = 60.0):
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        answers, deadline = {}, time.monotonic() + limit_s
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.01):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = (False, f"exited with code {self._exit_code(rank)}")
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 15.0)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if failed or silent:
            stacks = self._stacks(silent)
            self.close()
            raise RankError(
                "\n".join(
                    [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
                    + [f"rank {rank}: no answer within the limit\n{stacks[rank]}" for rank in silent]
                )
            )
        return [answers[rank][1] for rank in range(self.world_size)]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def _start(self):
        self._folder = tempfile.mkdtemp(prefix="ranks")
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                daemon=True,
                args=(rank, self.world_size, self.device, self.timeout_s, self._folder, theirs),
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _exit_code(self, rank):
        self._processes[rank].join(5)
        return self._processes[rank].exitcode

    def _stacks(self, ranks):
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0 if ranks else 0.0)
        stacks = {}
        for rank in ranks:
            path = os.path.join(self._folder, f"stacks{rank}")
            stacks[rank] = open(path).read() if os.path.exists(path) else "no stacks"
        return stacks


def _serve(rank, world_size, device, timeout_s, folder, pipe):
    faulthandler.register(signal.SIGUSR1, open(os.path.join(folder, f"stacks{rank}"), "w"))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR=device,
    )
    import torch

    torch.set_num_threads(1)
    from deepspeed import comm

    if device == "cuda":
        torch.cuda.set_device(rank)
    comm.init_distributed(
        "nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send((True, function(*args)))
        except BaseException:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))
