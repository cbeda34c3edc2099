"""The report about a machine: its checks, its exit codes, its JSON, and the archive for whoever has to help."""

import contextlib
import json
import os
import tarfile
import time
from types import SimpleNamespace

import pytest
import torch

from ds_tileoverlap import cli, doctor
from ds_tileoverlap.op_builder.tileoverlap import STALE_LOCK_S, TileOverlapBuilder


def run(*arguments):
    return cli.main(["doctor", *arguments])


def report_of(capsys, *arguments):
    code = run("--json", *arguments)
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"checks", "sound"} and report["sound"] == (code == 0)
    assert all(check.keys() == {"name", "status", "detail"} for check in report["checks"])
    return {check["name"]: check for check in report["checks"]}


def config_of(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    return str(path)


def test_two_ranks_train_a_step_here(capsys):
    checks = report_of(capsys)
    assert checks.keys() >= {"versions", "AutoEP", "GPUs", "operator", "environment", "exchange"}
    assert checks["exchange"]["status"] == "ok" and "backend " in checks["exchange"]["detail"]


@pytest.mark.parametrize(
    "text,status,words",
    [
        ('{"tile_overlap": {"enabled": true}}', "ok", "backend 'auto'"),
        ('{"tile_overlap": {"enabled": false}}', "ok", "as DeepSpeed made them"),
        ("{}", "ok", "no block"),
        ('{"tile_overlap": {"enabled": 3}}', "fault", "got 3, expected true or false"),
        ("{", "fault", "ds_config.json: Bad key name"),
        ("[1, 2]", "fault", "ds_config.json: got [1, 2], expected an object"),
        ('{"tile_overlap": {}, "tile_overlap": {"enabled": true}}', "fault", "ds_config.json: Duplicate keys"),
    ],
)
def test_ds_config(capsys, tmp_path, text, status, words):
    check = report_of(capsys, "--no-exchange", "--config", config_of(tmp_path, text))["ds_config"]
    assert check["status"] == status and words in check["detail"]


def test_a_missing_ds_config_is_a_fault(capsys, tmp_path):
    check = report_of(capsys, "--no-exchange", "--config", str(tmp_path / "none.json"))["ds_config"]
    assert check["status"] == "fault" and "none.json" in check["detail"]


def test_a_variable_that_keeps_layers_sequential(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert report_of(capsys, "--no-exchange")["environment"]["status"] == "fault"


def test_variables_of_others_are_not_told(capsys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_KEY", "of nobody else")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    checks = report_of(capsys, "--no-exchange")
    assert checks["environment"]["status"] == "ok" and "NCCL_DEBUG=WARN" in checks["environment"]["detail"]
    assert "AWS_SECRET_KEY" not in str(checks) and "of nobody else" not in str(checks)


AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    "capabilities,apart,gpus,links",
    [
        ([HOPPER, HOPPER], [], ("ok", "2: GPU (9.0, 80 GiB)"), ("ok", "peer access between all, 123 to 123 GB/s")),
        ([HOPPER, AMPERE], [], ("no", "2: GPU (8.0, 80 GiB), GPU (9.0, 80 GiB); overlap needs"), ("ok", "between all")),
        ([BLACKWELL] * 2, [], ("no", "2: GPU (10.0, 80 GiB); overlap needs"), ("ok", "between all")),
        ([HOPPER] * 3, [(2, 1)], ("ok", "3: "), ("no", "no peer access from GPU 2 to 1; ")),
    ],
    ids=["Hopper", "Ampere among them", "Blackwell", "no peer access"],
)
def test_what_gpus_can_do(monkeypatch, capabilities, apart, gpus, links):
    kinds = [
        SimpleNamespace(name="GPU", major=major, minor=minor, total_memory=80 * 2**30) for major, minor in capabilities
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kinds[device])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)
    monkeypatch.setattr(doctor, "copy_speed", lambda source, target: 123.0)
    for found, (status, words) in zip([doctor._gpus(), *doctor._links()], [gpus, links], strict=True):
        assert found.status == status and words in found.detail


@pytest.mark.parametrize(
    "age_s,status", [(2 * STALE_LOCK_S, "fault"), (0.0, "ok")], ids=["of a killed build", "of a build"]
)
def test_a_lock_of_the_build(monkeypatch, tmp_path, age_s, status):
    monkeypatch.setattr(TileOverlapBuilder, "refusal", lambda builder: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / TileOverlapBuilder.NAME / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    found = doctor._operator()
    assert found.status == status and (f"remove {lock}" in found.detail) == (status == "fault")


@pytest.mark.parametrize("error,status", [(1e-3, "ok"), (1.0, "fault"), (float("nan"), "fault")])
def test_an_exchange_with_other_results_is_a_fault(monkeypatch, error, status):
    answer = json.dumps({"backend": "overlap", "device": "cuda", "error": error, "allowed": 2e-2})
    launcher = SimpleNamespace(communicate=lambda: (f"some words\n{answer}\n", ""), returncode=0)
    monkeypatch.setattr(doctor, "running", lambda *args, **options: contextlib.nullcontext(launcher))
    found = list(doctor.checks())[-1]
    assert found.name == "exchange" and found.status == status and f"(error {error:.1e})" in found.detail


def test_an_exchange_that_does_not_end_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "EXCHANGE_LIMIT_S", 0.05)
    found = list(doctor.checks())[-1]
    assert found.name == "exchange" and found.status == "fault" and "in 0 s" in found.detail


def test_ranks_that_fail_say_why(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "no such thing")
    found = list(doctor.checks())[-1]
    assert found.status == "fault" and "two ranks failed: " in found.detail and "no message" not in found.detail


def test_bundle(capsys, tmp_path):
    path = tmp_path / "report.tar.gz"
    assert run("--no-exchange", "--bundle", str(path)) == 0
    assert "versions" in capsys.readouterr().out
    with tarfile.open(path) as archive:
        names = {entry.name.removeprefix("ds-tileoverlap/") for entry in archive}
        report = json.load(archive.extractfile("ds-tileoverlap/report.json"))
    assert names == {"report.json", "packages.txt", "nvidia-smi.txt", "topology.txt"} and report["sound"]
    before = path.read_bytes()
    assert run("--no-exchange", "--bundle", str(path)) == 2 and path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_bundle_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda *_: [])
    path = tmp_path / f"{'long' * 60}.tar.gz"
    assert run("--bundle", str(path)) == 2
    assert f"--bundle: {path} cannot be written: [Errno " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_bundle_needs_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "checks", None)
    assert run("--bundle", str(tmp_path / "none" / "report.tar.gz")) == 2
    assert f"--bundle: got no folder {tmp_path / 'none'}, expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
