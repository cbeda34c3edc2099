"""``ds-tileoverlap doctor``: what this machine can do, what it cannot, and why.

Each check is a line: ``ok``; ``no``, what this machine does not have, and what follows; or ``fault``, to be put right.
The last one trains a small layer on two ranks, on GPUs where there are two. ``--bundle`` packs the report, the versions
of all packages, and what nvidia-smi says of GPUs and topology; of the environment only variables of CUDA, NCCL, torch,
NVSHMEM, DeepSpeed and this package.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch

from . import versions
from .appearing import appearing
from .arguments import UsageError
from .bench.measure import copy_speed
from .config import BLOCK, ConfigError, parse, read
from .programs import printed_by
from .ranks import last_words, running

OK, NO, FAULT = "ok", "no", "fault"
EXCHANGE_LIMIT_S = 300.0
# Variables that a report of a problem needs; others may be nobody's business.
PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "NVSHMEM_", "DS_")


class Check(NamedTuple):
    name: str
    status: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="a ds_config file: is its block right, and what would run")
    parser.add_argument("--no-exchange", action="store_true", help="leave out the check on two ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bundle", type=Path, help="also write everything that a report of a problem needs (.tar.gz)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0, or 1 where there is a fault.

    Raises:
        UsageError: there is no place for the bundle, or it cannot be written.
    """
    if arguments.bundle:
        _check_place(arguments.bundle)
    found = list(checks(arguments.config, not arguments.no_exchange))
    report = {"checks": [check._asdict() for check in found], "sound": all(c.status != FAULT for c in found)}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(found)
    if arguments.bundle:
        try:
            _write_bundle(arguments.bundle, report)
        except OSError as error:
            raise UsageError(f"--bundle: {arguments.bundle} cannot be written: {error}") from error
        print(f"{arguments.bundle}: written", file=sys.stderr)
    return 0 if report["sound"] else 1


def _check_place(bundle: Path) -> None:
    if bundle.exists():
        raise UsageError(f"--bundle: {bundle} exists already")
    if not bundle.parent.is_dir():
        raise UsageError(f"--bundle: got no folder {bundle.parent}, expected one to put {bundle.name} into")


def checks(config: Path | None = None, exchange: bool = True) -> Iterator[Check]:
    """All checks, one after the other; an exchange can take a minute where the operator has to be built first."""
    yield _versions()
    yield _transformers()
    yield _gpus()
    yield from _links()
    yield _operator()
    yield _profile()
    yield _environment()
    if config is not None:
        yield _ds_config(config)
    if exchange:
        yield _exchange()


def _versions() -> Check:
    """The package would not have been imported with others."""
    names = ("torch", "triton", "deepspeed")
    found = [f"{name} {metadata.version(name)}" for name in names]
    return Check("versions", OK, ", ".join([f"python {sys.version.split()[0]}", *found]))


def _transformers() -> Check:
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return Check("AutoEP", NO, "transformers is not installed; Hugging Face models need it")
    if lines := versions.untested({"transformers": found}):
        return Check("AutoEP", NO, f"{lines[0]}; DeepSpeed's own MoE layers do not need it")
    return Check("AutoEP", OK, f"transformers {found}")


def _gpus() -> Check:
    if not torch.cuda.is_available():
        return Check("GPUs", NO, "none; layers run on the CPU, backend sequential")
    kinds = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    lines = {f"{p.name} ({p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB)" for p in kinds}
    if any((p.major, p.minor) != (9, 0) for p in kinds):
        return Check("GPUs", NO, f"{len(kinds)}: {', '.join(sorted(lines))}; overlap needs compute capability 9.0")
    return Check("GPUs", OK, f"{len(kinds)}: {', '.join(sorted(lines))}")


def _links() -> Iterator[Check]:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if without:
        yield Check("links", NO, f"no peer access from GPU {', '.join(without)}; groups with these are sequential")
    elif pairs:
        speeds = [copy_speed(a, b) for a, b in pairs if a == 0 or b == 0]
        yield Check(
            "links", OK, f"peer access between all, {min(speeds):.0f} to {max(speeds):.0f} GB/s from and to GPU 0"
        )


def _operator() -> Check:
    from .op_builder.tileoverlap import TileOverlapBuilder, stale_lock

    builder = TileOverlapBuilder()
    if reason := builder.refusal():
        return Check("operator", FAULT if torch.cuda.is_available() else NO, f"{reason}; layers are sequential")
    if lock := stale_lock():
        return Check("operator", FAULT, f"a build was killed: remove {lock}")
    return Check("operator", OK, "built ahead of time, or built at first use (under a minute)")


def _profile() -> Check:
    count = torch.cuda.device_count()
    if count < 2:
        return Check("profile", NO, "none; a profile is of two GPUs or more")
    from .planning import machine

    found, ignored = machine.find(machine.AUTO, machine.describe(count))
    if found is None:
        known = f"none for {count} such GPUs: 'auto' decides nothing by itself; ds-tileoverlap tune measures one"
    else:
        source = found.source
        known = f"{found.name}, measured {source['date']} with torch {source['torch']}, driver {source['driver']}"
    return Check("profile", NO if found is None else OK, "; ".join([known, *ignored]))


def _environment() -> Check:
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return Check("environment", FAULT, "CUDA_LAUNCH_BLOCKING=1: layers are sequential while it is set")
    found = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)}
    return Check("environment", OK, " ".join(f"{name}={value}" for name, value in found.items()) or "nothing set")


def _ds_config(path: Path) -> Check:
    try:
        config = parse(read(path))
    except ConfigError as error:
        return Check("ds_config", FAULT, str(error))
    if config is None:
        return Check("ds_config", OK, f"{path}: no block {BLOCK!r}; only layers built with ds_tileoverlap.MoE are ours")
    if not config.enabled:
        return Check("ds_config", OK, f"{path}: {BLOCK}.enabled is false; layers run as DeepSpeed made them")
    return Check("ds_config", OK, f"{path}: backend {config.backend!r}; what 'auto' becomes here: see 'exchange'")


def _exchange() -> Check:
    began, pipes = time.monotonic(), dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with running(2, __name__, limit_s=EXCHANGE_LIMIT_S, **pipes) as launcher:
            out, err = launcher.communicate()
    except TimeoutError:
        return Check(
            "exchange", FAULT, f"two ranks did not train one step of a small layer in {EXCHANGE_LIMIT_S:.0f} s"
        )
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if launcher.returncode or not answers:
        return Check("exchange", FAULT, f"two ranks failed: {last_words(err)}")
    answer = json.loads(answers[-1])
    detail = (
        f"two ranks on {answer['device']}, backend {answer['backend']}: forward and backward as the reference's "
        f"(error {answer['error']:.1e}), {time.monotonic() - began:.0f} s with start"
    )
    return Check("exchange", OK if answer["error"] <= answer["allowed"] else FAULT, detail)


def _worker() -> None:
    """A rank of :func:`_exchange`: one step of a small layer, on what ``auto`` chooses and on the reference."""
    import deepspeed

    from . import MoE, configure

    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    deepspeed.init_distributed("nccl" if on_gpus else "gloo", verbose=False)
    torch.manual_seed(0)
    dtype, width = torch.bfloat16 if on_gpus else torch.float32, 256
    expert = torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width, False), torch.nn.SiLU(), torch.nn.Linear(2 * width, width, False)
    )
    options = dict(num_experts=8, ep_size=2, k=2, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)
    layer = MoE(width, expert, **options).to(device, dtype)
    reference = copy.deepcopy(layer)
    configure(reference, {BLOCK: {"enabled": True, "backend": "reference"}})
    torch.manual_seed(1 + rank)
    x = torch.randn(512 + 100 * rank, width, device=device, dtype=dtype)
    results = []
    for each in (layer, reference):
        each.set_deepspeed_parallelism()
        own = x.clone().requires_grad_()
        y = each(own)[0]
        y.float().square().sum().backward()
        results.append(torch.cat([y.detach().flatten(), own.grad.flatten()]).double())
    error = ((results[0] - results[1]).norm() / results[1].norm()).item()
    if rank == 0:
        backend = layer.deepspeed_moe.tile_overlap.backend
        allowed = 2e-2 if on_gpus else 1e-5
        print(json.dumps({"backend": backend, "device": device.type, "error": error, "allowed": allowed}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _show(found: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    colours = {OK: "green", NO: "yellow", FAULT: "red"}
    for check in found:
        table.add_row(Text(check.status, colours[check.status]), Text(check.name), Text(check.detail))
    Console().print(table)


def _write_bundle(path: Path, report: dict) -> None:
    """The report, the installed packages and what the driver says, in one archive that is there whole or not at all."""
    nvidia_smi = functools.partial(printed_by, "nvidia-smi", limit_s=60.0, with_errors=True)
    outputs = {
        "report.json": json.dumps(report, indent=2),
        "packages.txt": "\n".join(sorted(f"{d.name}=={d.version}" for d in metadata.distributions())),
        "nvidia-smi.txt": nvidia_smi("-q"),
        "topology.txt": nvidia_smi("topo", "-m"),
    }
    with appearing(path) as part, tarfile.open(part, "w:gz") as archive:
        for name, text in outputs.items():
            entry, data = tarfile.TarInfo(f"ds-tileoverlap/{name}"), text.encode()
            entry.size = len(data)
            archive.addfile(entry, BytesIO(data))


if __name__ == "__main__":
    _worker()
