"""The operator without a GPU: kernels compile for Hopper, Python and C++ agree on every call, builds are guarded."""

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils import cpp_extension

from ds_tileoverlap import (
    buffer,
    config,
    layout,
    overlap,
    overlap_group,
    overlap_stages,
    route,
    schedule,
    symmetric_layout,
)
from ds_tileoverlap.activation import Activation
from ds_tileoverlap.exchange import Peers
from ds_tileoverlap.expert_form import ExpertForm
from ds_tileoverlap.expert_weights import ExpertWeights, WeightLayout
from ds_tileoverlap.op_builder import tileoverlap as builders
from ds_tileoverlap.trace.recorder import EVENT, DeviceRecorder
from ds_tileoverlap.weight_maps import WeightMaps

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", builders.GENCODE, "-Wno-deprecated-declarations"]


@needs_nvcc
@pytest.mark.parametrize("name", builders.KERNELS)
def test_kernels_compile_for_hopper_without_spills(tmp_path, name):
    source = builders._csrc() / name
    assert "torch" not in re.sub(r"//.*", "", source.read_text()), "kernel files must compile without torch's headers"
    command = ["nvcc", *FLAGS, "-Xptxas", "-v", "-c", str(source), "-o", str(tmp_path / "out.o")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    # What ptxas says where it makes every WGMMA wait for the one before.
    assert "serialized" not in report, report
    kernels = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    # The index kernels are short; where registers are scarce they may put a word or two aside.
    allowed = 16 if name == "layout.cu" else 0
    assert kernels and all(int(number) <= allowed for numbers in kernels for number in numbers), report


# What the operator does without the device.
ON_HOST = {"wait_and_place", "place_lists"}


@pytest.fixture(scope="module")
def dry_op(tmp_path_factory):
    """The operator, whose kernels cannot start here: calls come back as soon as CUDA refuses them."""
    path = tmp_path_factory.mktemp("op") / "tileoverlap.so"
    includes = [cpp_extension.include_paths()[0], sysconfig.get_paths()["include"]]
    sources = [str(builders._csrc() / name) for name in ("bindings.cpp", *builders.KERNELS)]
    define = f"-DTORCH_EXTENSION_NAME={path.stem}"
    subprocess.run(
        ["nvcc", *FLAGS, "-shared", define, *(f"-I{i}" for i in includes), *sources, "-o", str(path)], check=True
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    op = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(op)
    calls = []

    def refused(name):
        function = getattr(op, name)

        def call(*shared, **arguments):
            calls.append(name)
            if name in ON_HOST:
                return function(*shared, **arguments)
            with pytest.raises(RuntimeError, match=f"{name}: CUDA error"):
                function(*shared, **arguments)

        return call

    functions = [name for name in dir(op) if name[0].islower() and name[0] != "_"]
    constants = {name: getattr(op, name) for name in dir(op) if name[0].isupper()}
    return SimpleNamespace(calls=calls, **constants, **{name: refused(name) for name in functions})


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels would start")
@pytest.mark.parametrize("combine,comm_sms", [("rows", 0), ("sums", 4)])
def test_python_and_the_operator_agree_on_every_call(dry_op, monkeypatch, combine, comm_sms):
    event = SimpleNamespace(record=lambda stream: dry_op.calls.append("record"))
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    words, peers = torch.zeros(64, dtype=torch.int32), Peers(None, 0, (0, 1), 5.0, "test")
    stand_in = SimpleNamespace(peers=peers, op=dry_op, addresses=torch.tensor)
    channel = buffer.Channel(stand_in, words, [0, 0], 0, words[: buffer.OWN_WORDS + 2])
    channel.reserve = lambda *sizes: None
    counts = torch.full((2, 8 + 2 + 1), 5, dtype=torch.int32)
    counts[:, -1] = 0
    shared = "peer_counts peer_ready ready host_counts host_failure host_ready".split()
    pool = SimpleNamespace(
        **dict.fromkeys(["host_ready", "failure", "host_failure", "claimed_items"], words[:5]),
        **dict.fromkeys(["records", "tokens", "returns", "scalars"], channel),
        **dict(device="cpu", stream=stream, forked=event, joined=event, host_counts=counts.flatten()),
        **dict(peers=peers, trace=0, meet=lambda: None),
        mailbox=dict.fromkeys(shared, words.data_ptr()) | {"stride": 16},
        signals_for=lambda count: words.data_ptr(),
        allocate=lambda count, dtype: (words, [0, 0]),
        follow=lambda stream: None,
        addresses=torch.tensor,
    )
    # The counts are there.
    pool.host_ready, pool.mailbox["host_counts"] = words[:1], pool.host_counts.data_ptr()
    ready = torch.ones(1, dtype=torch.int32)
    pool.mailbox["host_ready"] = ready.data_ptr()
    dry_op.calls.clear()
    overlap_group._load_kernels(dry_op, pool)
    loaded = set(dry_op.calls)
    group = overlap_group.Group(dry_op, None, pool, 132)
    routes = route.Routes(torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 2), None, None)
    settings = config.TileOverlapConfig(enabled=True, combine=combine)
    plan = symmetric_layout.Counting(routes, 8, peers, group, settings, 128, True).finish([128], [64])
    assert plan.returns.sums == (combine == "sums") and plan.tally.all_can_overlap
    zeroed = {name: torch.zeros_like(getattr(plan, name)) for name in layout._TENSOR_FIELDS if name != "counts"}
    plan = dataclasses.replace(plan, **zeroed)
    settings = config.TileOverlapConfig(enabled=True, combine=combine, comm_sms=comm_sms, overlap_dispatch=not comm_sms)
    gemms = [(128, schedule.ARRIVALS), (schedule.gated_width(128), schedule.ARRIVALS), (64, plan.returns)]
    run = overlap_stages.run_of(plan, group, settings, WeightMaps(), 128, gemms)

    def stages(name):
        return nullcontext()

    rows, tokens = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    inputs, down = [[(0, 4, torch.zeros(4, 128, 64))]] * 2, [(0, 4, torch.zeros(4, 64, 128))]
    form = ExpertForm(Activation("silu"), "gate", "up", "down", (False, False, False))
    weights = ExpertWeights(WeightLayout(form, False, False, (), ()), inputs, down, {})
    operands = [overlap_stages.Operand(f"input {i}", stack, False) for i, stack in enumerate(inputs)]
    results, expanded = overlap_stages.project_arriving(tokens, operands, plan, run)
    assert [result.shape for result in results] == [(40, 128)] * 2 and expanded.shape == (40, 64)
    hidden, parts, _ = overlap._hidden_rows(tokens, overlap._input_operands(weights, True), True, weights, plan, run)
    assert [part.shape for part in (hidden, *parts)] == [(40, 128)] * 3
    operand = overlap_stages.Operand("down", down, False)
    sums = overlap_stages.return_while_computed([(rows, operand)], plan, run, stages, "combine")
    assert sums.shape == (8, 64)
    # Couriers with SMs of their own start when the use of their channel has begun, and nothing else is done.
    own_sms = ["begin_returning", "record", "multiply_returning", "run_couriers_home", "record", "sum_returned"]
    order = own_sms if comm_sms else ["multiply_returning", "sum_returned"]
    assert dry_op.calls[-len(order) :] == order
    grad_x, grad_weights, found = overlap.backward(
        tokens, tokens, expanded, plan, [rows, rows], weights, set(form.slots), stages, run, 128
    )
    assert EVENT.itemsize == dry_op.EVENT_BYTES
    assert grad_x.shape == (8, 64) and grad_weights.shape == (8, 2) and found.keys() == set(form.slots)
    recorder = DeviceRecorder(group, peers, capacity=10)
    recorder.enter("dispatch", "layer")
    assert pool.trace
    recorder.leave()
    assert not pool.trace
    waiting = {"expert_gemm", "run_couriers", "sum_returned", "place", "schedule_and_receive"}
    waiting |= {"send_scalars", "collect_scalars"}
    assert waiting <= loaded, "kernels that wait must be loaded before the first of them waits"
    # Everything that the operator offers has been called; the tests of kernels on their own call the last two.
    offered = {name for name, value in vars(dry_op).items() if callable(value) and name[0].islower()}
    unused = {"project_arriving"} if comm_sms else {"arrive", "begin_returning", "run_couriers_home"}
    assert offered - set(dry_op.calls) == unused | {"sum_slots", "begin"}


def test_reason_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    builder = builders.TileOverlapBuilder()
    assert not builder.is_compatible() and builder.refusal() == "this torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.6+PTX")
    assert "TORCH_CUDA_ARCH_LIST: got '8.0;8.6+PTX', expected 9.0a" in builder.refusal()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    assert "ARCH_LIST" not in (builder.refusal() or "")
    monkeypatch.setattr(builders, "installed_cuda_version", lambda name: (12, 4))
    assert builder.refusal() == "nvcc is of CUDA 12, but torch was built for CUDA 13.0"


def test_a_lock_is_waited_for_and_a_stale_one_is_named(tmp_path, capsys, monkeypatch):
    lock = tmp_path / "lock"
    builders._wait_for_lock(tmp_path)
    assert "building the overlap kernels" in capsys.readouterr().out
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(RuntimeError, match=f"remove {lock}"):
        builders._wait_for_lock(tmp_path)
    lock.touch()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            lock.unlink()

    monkeypatch.setattr(builders.time, "sleep", sleep)
    builders._wait_for_lock(tmp_path)
    assert len(slept) == 3


def test_import_compiles_nothing_and_makes_no_context():
    code = (
        "import sys, torch, ds_tileoverlap; assert not torch.cuda.is_initialized(); "
        "assert not any('op_builder.tileoverlap' in name or name == 'tileoverlap' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})


def test_common_refusal_names_the_rank_and_the_reason():
    peers = Peers(None, 0, (4, 5), 5.0, "test")
    fine = (None, "host", "gpu0")
    assert overlap_group._common_refusal([fine, ("no nvcc", "host", "gpu1")], peers) == "no nvcc (rank 5)"
    assert "spans 2 machines (a, b)" in overlap_group._common_refusal([(None, "a", "gpu0"), (None, "b", "gpu1")], peers)
    assert "share a GPU" in overlap_group._common_refusal([fine, fine], peers)
    assert overlap_group._common_refusal([fine, (None, "host", "gpu1")], peers) is None
