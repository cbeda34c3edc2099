"""The operator on a CPU: its own sources, compiled with a small stand-in for CUDA; only the GEMMs are written anew.

Every call runs its kernels to the end before it returns, with Python's lock released: ranks are threads of one process,
and a rank that waits for a peer in a kernel does not hold it up.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from ds_tileoverlap.op_builder import tileoverlap as builders

HERE = Path(__file__).resolve().parent / "emulation"
# Kernels that multiply are written anew.
KERNELS = [name for name in builders.KERNELS if name not in ("expert_gemm.cu", "weight_grads.cu")]
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


def build(folder: Path, edits: Sequence[tuple[str, str, str]] = ()):
    """Compiles the operator in a folder of its own and imports it.

    Args:
        edits: (file, text, other text): a guard to take away, to see what it guards against.
    """
    for path in builders._csrc().iterdir():
        if path.suffix in (".cu", ".cuh", ".cpp"):
            source = path.read_text()
            for _, text, instead in [edit for edit in edits if edit[0] == path.name]:
                assert source.count(text) == 1, (path.name, text)
                source = source.replace(text, instead)
            name = path.with_suffix(".cpp" if path.suffix == ".cu" else path.suffix).name
            (folder / name).write_text(as_cpp(path.name, source))
    for path in HERE.iterdir():
        shutil.copy(path, folder)
    # Fibers jump between stacks; what some compilers check by default ends the process there.
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE"]
    flags += ["-fPIC", "-D__CUDACC__", "-DTORCH_EXTENSION_NAME=emulated", f"-I{folder}"]
    flags += [f"-I{cpp_extension.include_paths()[0]}", f"-I{sysconfig.get_paths()['include']}"]
    names = ["expert_gemm.cpp", "weight_grads.cpp", *(name.replace(".cu", ".cpp") for name in KERNELS)]
    sources = {name: text_of(name, folder) for name in names}
    # Guards are in the kernels; what Python calls, the longest to compile, is the same for all builds.
    sources["bindings.cpp"] = ""
    new = {(n, text): folder / f"{n}.o" for n, text in sources.items() if (n, text) not in _OBJECTS}
    compilers = [subprocess.Popen(["g++", *flags, "-c", str(folder / n), "-o", str(o)]) for (n, _), o in new.items()]
    assert not any([compiler.wait() for compiler in compilers]), "the emulated operator does not compile"
    _OBJECTS.update(new)
    objects = {name: _OBJECTS[name, text] for name, text in sources.items()}
    # Python knows a module by its name: each build has its own.
    name = f"emulated_{len(_BUILDS)}"
    _BUILDS.append(folder)
    bindings, objects["bindings.cpp"] = objects["bindings.cpp"], folder / "named_bindings.o"
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


# (source, its text) -> what was compiled of it, by any build.
_OBJECTS: dict[tuple[str, str], Path] = {}
_BUILDS: list[Path] = []


def text_of(name: str, folder: Path) -> str:
    """A source with all that it includes from the folder."""
    text = (folder / name).read_text()
    included = [header for header in re.findall(r'#include "(.+)"', text) if (folder / header).exists()]
    return "".join([text, *(text_of(header, folder) for header in included)])


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


# --- streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """Calls that a thread makes one after the other, as a GPU's stream runs kernels.

    None is made before :meth:`run`: threads that wait in kernels would hold up the one that still enqueues.
    """

    def __init__(self):
        self._calls, self.cuda_stream = [], id(self)

    def enqueue(self, function, *args, **kwargs) -> Future:
        done = Future()
        self._calls.append((done, functools.partial(function, *args, **kwargs)))
        return done

    def wait_event(self, event: Event) -> None:
        # As it is recorded now: it may be recorded anew before this stream comes here.
        self.enqueue(event.recorded.result)

    def run(self) -> list[Future]:
        calls, self._calls = self._calls, []
        for done, call in calls:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
        return [done for done, _ in calls]


class Event:
    """A place in a stream, and when it was passed."""

    def __init__(self, enable_timing: bool = False):
        self.recorded: Future = Future()

    def record(self, stream: Stream) -> None:
        self.recorded = stream.enqueue(time.perf_counter)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1e3 * (end.recorded.result() - self.recorded.result())


class Enqueued:
    """The emulated operator whose kernels run on :class:`Stream`: a call that names one returns at once."""

    def __init__(self, op, streams: Sequence[Stream]):
        self._op, self._streams = op, {stream.cuda_stream: stream for stream in streams}

    def __getattr__(self, name: str):
        found = getattr(self._op, name)

        def call(**arguments):
            stream = self._streams.get(arguments.get("stream"))
            return stream.enqueue(found, **arguments) if stream else found(**arguments)

        return call if callable(found) else found


class Host:
    """What a play of :mod:`virtual_ranks` needs of the host, named as in :class:`virtual_ranks.Gpu`."""

    device, event = torch.device("cpu"), Event

    def __init__(self, op, most_ranks: int = 8):
        self.streams = tuple([Stream() for _ in range(most_ranks)] for _ in range(2))
        self._all = [*self.streams[0], *self.streams[1]]
        self.op = Enqueued(op, self._all)

    @staticmethod
    def sleep(stream: Stream, ms: float) -> None:
        if ms:
            stream.enqueue(time.sleep, ms / 1e3)

    def load_kernels(self) -> None:
        """They are in memory already."""

    def synchronize(self) -> None:
        """Raises what a call has raised."""
        with ThreadPoolExecutor(len(self._all)) as threads:
            for calls in threads.map(Stream.run, self._all):
                for call in calls:
                    call.result()
