"""Builds ``csrc``: on first use with ninja, or ahead of time with ``DS_BUILD_TILEOVERLAP=1 pip install .``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from pathlib import Path

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, MissingCUDAException, installed_cuda_version
from torch.utils import cpp_extension

# The only architecture that the kernels are written for: 9.0 with the instructions of Hopper alone.
ARCH = "90a"
GENCODE = f"-gencode=arch=compute_{ARCH},code=sm_{ARCH}"
KERNELS = ("layout.cu", "schedule.cu", "expert_gemm.cu", "weight_grads.cu", "combine.cu", "trace.cu")
# A build takes about a minute; a lock that is older than this was left by a build that was killed.
STALE_LOCK_S = 900.0


class TileOverlapBuilder(CUDAOpBuilder):
    """DeepSpeed's builder for the kernels of the overlap backend."""

    BUILD_VAR = "DS_BUILD_TILEOVERLAP"
    NAME = "tileoverlap"

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return "ds_tileoverlap._tileoverlap"

    def sources(self) -> list[str]:
        return [str(_csrc() / name) for name in ("bindings.cpp", *KERNELS)]

    def include_paths(self) -> list[str]:
        return [str(_csrc())]

    def nvcc_args(self) -> list[str]:
        # DeepSpeed's own add fast-math, and cannot read the "a" of 9.0a. torch adds no architecture beside this one.
        return ["-O3", "-std=c++17", GENCODE, "-Wno-deprecated-declarations"]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        return [GENCODE]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the kernels can be built and run here; makes no CUDA context. The reason is in :meth:`refusal`."""
        reason = self.refusal()
        if reason and verbose:
            self.warning(reason)
        self.error_log = reason
        return reason is None

    def refusal(self) -> str | None:
        """Why the operator cannot be built or run here; ``None`` where it can."""
        if torch.version.cuda is None:
            return "this torch was built without CUDA"
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST")
        if wanted and not any(arch.split("+")[0] in ("9.0", "9.0a") for arch in wanted.replace(";", " ").split()):
            return f"TORCH_CUDA_ARCH_LIST: got {wanted!r}, expected 9.0a among them (the kernels need Hopper)"
        if importlib.util.find_spec(self.absolute_name()) is not None:
            return None
        try:
            major, _ = installed_cuda_version(self.name)
        except MissingCUDAException as error:
            return f"nvcc was not found, and no prebuilt operator is installed ({error})"
        except FileNotFoundError as error:
            return f"nvcc was not found at {error.filename}, and no prebuilt operator is installed"
        if major != int(torch.version.cuda.split(".")[0]):
            return f"nvcc is of CUDA {major}, but torch was built for CUDA {torch.version.cuda}"
        return None

    def load(self, verbose: bool = False):
        """The operator: the prebuilt one if there is one, otherwise built now, by one process of the machine.

        Raises:
            RuntimeError: it cannot be built here, or an earlier build was killed; the message says what to do.
        """
        if self.name in CUDAOpBuilder._loaded_ops:
            return CUDAOpBuilder._loaded_ops[self.name]
        if importlib.util.find_spec(self.absolute_name()) is not None:
            module = importlib.import_module(self.absolute_name())
            CUDAOpBuilder._loaded_ops[self.name] = module
            return module
        _wait_for_lock(Path(cpp_extension._get_build_directory(self.name, verbose=False)))
        return self.jit_load(verbose)


def _csrc() -> Path:
    """The sources: beside the installed package, or in the repository."""
    here = Path(__file__).resolve().parent
    installed = here.parent / "csrc"
    return installed if installed.is_dir() else here.parent / "ds_tileoverlap" / "csrc"


def stale_lock() -> Path | None:
    """The lock that a killed build left behind, if there is one."""
    lock = Path(cpp_extension._get_build_directory(TileOverlapBuilder.NAME, verbose=False)) / "lock"
    age_s = _age_of(lock)
    return lock if age_s is not None and age_s > STALE_LOCK_S else None


def _age_of(path: Path) -> float | None:
    """Seconds since the file was written; ``None`` where it is not there."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def _wait_for_lock(build_directory: Path) -> None:
    """Waits for another rank's build; torch would wait for a killed one for ever, without a word."""
    lock, binary = build_directory / "lock", build_directory / f"{TileOverlapBuilder.NAME}.so"
    if not lock.exists():
        if not binary.exists():
            print(
                f"ds_tileoverlap: building the overlap kernels (once, about a minute) in {build_directory}", flush=True
            )
        return
    said = time.monotonic()
    while (age_s := _age_of(lock)) is not None:
        if age_s > STALE_LOCK_S:
            raise RuntimeError(
                f"ds_tileoverlap: a build that began {age_s / 60:.0f} minutes ago never ended: "
                f"remove {lock} and start again"
            )
        if time.monotonic() - said > 20:
            said = time.monotonic()
            print(
                f"ds_tileoverlap: waiting for another process to build the kernels ({age_s:.0f} s so far)", flush=True
            )
        time.sleep(0.2)
