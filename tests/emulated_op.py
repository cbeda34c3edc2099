"""The operator on a CPU: its own sources, compiled with a small stand-in for CUDA; only the GEMM is written anew.

Every call runs its kernels to the end before it returns, with Python's lock released: ranks are threads of one process,
and a rank that waits for a peer in a kernel does not hold it up.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from torch.utils import cpp_extension

from ds_tileoverlap.op_builder import tileoverlap as builders

HERE = Path(__file__).resolve().parent / "emulation"
KERNELS = [name for name in builders.KERNELS if name != "expert_gemm.cu"]
# The functions of tile_signal.cuh that are single instructions: name -> what they do to `signal` or `counter`.
INSTRUCTIONS = {
    "publish": "__atomic_store_n(signal, epoch, __ATOMIC_SEQ_CST);",
    "publish_to_peer": "__atomic_store_n(signal, value, __ATOMIC_SEQ_CST);",
    "add_to": "__atomic_fetch_add(counter, value, __ATOMIC_SEQ_CST);",
    "add_to_peer": "__atomic_fetch_add(counter, value, __ATOMIC_SEQ_CST);",
    "read_signal": "return __atomic_load_n(signal, __ATOMIC_SEQ_CST);",
    "read_peer_signal": "return __atomic_load_n(signal, __ATOMIC_SEQ_CST);",
    "nanoseconds": "return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);",
}


def build(folder: Path, edit: tuple[str, str, str] | None = None):
    """Compiles the operator in a folder of its own and imports it.

    Args:
        edit: (file, text, other text): a guard to take away, to see what it guards against.
    """
    for path in builders._csrc().iterdir():
        if path.suffix in (".cu", ".cuh", ".cpp"):
            source = path.read_text()
            if edit and edit[0] == path.name:
                assert source.count(edit[1]) == 1, edit
                source = source.replace(*edit[1:])
            name = path.with_suffix(".cpp" if path.suffix == ".cu" else path.suffix).name
            (folder / name).write_text(as_cpp(path.name, source))
    for path in HERE.iterdir():
        shutil.copy(path, folder)
    flags = ["-std=c++20", "-O1", "-fPIC", "-D__CUDACC__", "-DTORCH_EXTENSION_NAME=emulated", f"-I{folder}"]
    flags += [f"-I{cpp_extension.include_paths()[0]}", f"-I{sysconfig.get_paths()['include']}"]
    names = ["expert_gemm.cpp", *(name.replace(".cu", ".cpp") for name in KERNELS)]
    objects = {name: folder / f"{name}.o" for name in names}
    # Guards are in the kernels; what Python calls, the longest to compile, is the same for all builds.
    bindings = _BINDINGS.setdefault("bindings.cpp", folder / "bindings.o")
    objects |= {} if bindings.exists() else {"bindings.cpp": bindings}
    compilers = [subprocess.Popen(["g++", *flags, "-c", str(folder / n), "-o", str(o)]) for n, o in objects.items()]
    assert not any([compiler.wait() for compiler in compilers]), "the emulated operator does not compile"
    # Python knows a module by its name: each build has its own.
    name = f"emulated_{len(_BUILDS)}"
    _BUILDS.append(folder)
    objects["bindings.cpp"] = folder / "named_bindings.o"
    rename = ["--redefine-sym", f"PyInit_emulated=PyInit_{name}", str(bindings), str(objects["bindings.cpp"])]
    subprocess.run(["objcopy", *rename], check=True)
    binary = folder / f"{name}.so"
    subprocess.run(["g++", "-shared", *map(str, objects.values()), "-o", str(binary)], check=True)
    spec = importlib.util.spec_from_file_location(name, binary)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hold_up(op, delays_ms: Mapping[str, float], seed: int = 1) -> None:
    """Makes kernels start late that the calling thread enqueues: kernel -> ms; "*": all, at random up to so much."""
    for kernel, ms in delays_ms.items():
        ctypes.CDLL(op.__file__).emulation_delay(kernel.encode(), ctypes.c_double(ms), seed)


_BINDINGS: dict[str, Path] = {}
_BUILDS: list[Path] = []


def as_cpp(name: str, source: str) -> str:
    """What a C++ compiler understands of a CUDA file."""
    if name == "tile_signal.cuh":
        for function, body in INSTRUCTIONS.items():
            source, count = re.subn(rf"(\b{function}\([^)]*\) \{{\n).*?\n\}}", rf"\1    {body}\n}}", source, flags=re.S)
            assert count == 1, function
    source = re.sub(
        r"__shared__ (\w+) (\w+)\[([^\]]+)\];", r"auto& \2 = emulation::shared<\1[\3], __LINE__>();", source
    )
    source = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = emulation::dynamic<\1>();", source)
    return launches(source)


def launches(source: str) -> str:
    """``kernel<<<grid, block, bytes, stream>>>(arguments);`` as a call of the emulation."""
    while (start := source.find("<<<")) >= 0:
        end = source.index(">>>(", start)
        grid, block, shared, _ = at_top_level(source[start + 3 : end])
        close = source.index(");", end)
        arguments = source[end + 4 : close]
        kernel = re.search(r"[\w:]+(<[\w, ]+>)?$", source[:start]).group()
        name = kernel.split("::")[-1].split("<")[0]
        call = f'emulation::launch("{name}", {grid}, {block}, {shared}, [&] {{ {kernel}({arguments}); }});'
        source = source[: start - len(kernel)] + call + source[close + 2 :]
    return source


def at_top_level(text: str) -> list[str]:
    """The parts of a list at those commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
