"""The report about a machine: its checks, its exit codes, its JSON, and the archive for whoever has to help."""

import json
import tarfile

import pytest

from ds_tileoverlap import cli, doctor


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
        ("{", "fault", "Expecting property name"),
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


def test_a_bundle_needs_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "checks", None)
    assert run("--bundle", str(tmp_path / "none" / "report.tar.gz")) == 2
    assert f"--bundle: got no folder {tmp_path / 'none'}, expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
