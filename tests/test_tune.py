"""``ds-tileoverlap tune``: what it makes of a machine's times, what goes wrong, and which profile then holds where."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_tileoverlap import cli, doctor, overlap_stages
from ds_tileoverlap.planning import fit, machine, tune, tune_worker
from ds_tileoverlap.planning.profile import DEFAULT, FOLDER, load, write
from ds_tileoverlap.planning.routing import Shape, balanced
from ds_tileoverlap.symmetric_layout import SEGMENT_BYTES

H200 = {"device": "NVIDIA H200", "link": "NV18", "ranks": 2}
HERE = {**H200, "driver": "600.1", "torch": "2.11.0+cu130", "nccl": "2.28.9", "ds_tileoverlap": "0.1.0"}
LINK_GBS = 378.0


@pytest.fixture
def profile():
    return load(DEFAULT)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of profiles, empty; XDG_CACHE_HOME stays, as the operator is built there."""
    monkeypatch.setattr(machine, "folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def record_of(layer, truth, settings=()):
    """What the stage benchmark would write where times are those of a profile.

    Args:
        settings: (setting, times as long as the usual one) of couriers with SMs of their own, and of segments.
    """
    environment = dict(device="NVIDIA H200", driver="600.1", torch="2.11.0+cu130", nccl="2.28.9", date="2027-01-01")
    record = {"shape": layer, "ranks": 2, "replayed": False, "environment": {**environment, "command": "worker"}}
    stages = fit.measured({**record, "times_ms": {}})
    record["times_ms"] = {
        f"{stage.work.stage.name}: {arm}": {"median": fit.ARMS[arm](stage.work, truth) / 1e3}
        for stage in stages
        for arm in fit.ARMS
        if arm != "serial" or stage.work.stage.name == "down"
    }
    record["returns"] = "sums" if stages[0].work.plan.returns.sums else "rows"
    record["gate"] = {"passed": True}
    for kind, usual, others in settings:
        arm = {"comm_sms": f"down: {record['returns']}", "segments": "down: segments"}[kind]
        for setting, ratio in {usual: 1.0, **others}.items():
            record["times_ms"][f"{arm} {setting}"] = {"median": ratio}
    return record


@pytest.fixture
def gpus(monkeypatch, profile):
    """Two GPUs whose rates are other than those of the package's profile; ``gpus.settings`` goes to the records."""
    rates = replace(profile.rates, block_us=1.1, torch_block_us=1.0, nccl_us=30.0, place_gbs=300.0, return_us=60.0)
    found = SimpleNamespace(truth=replace(profile, rates=rates), settings=lambda layer: (), layers=tune.LAYERS)

    def measure(num_ranks, limit_s):
        assert (num_ranks, limit_s) == (2, 120.0)
        return [record_of(layer, found.truth, found.settings(layer["name"])) for layer in found.layers], LINK_GBS

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(machine, "describe", lambda num_ranks: HERE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=profile.num_sms)
    )
    return found


def test_rates_are_found_and_the_profile_holds_here(gpus, capsys, cache):
    assert cli.main(["tune", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    path = cache / "NVIDIA-H200-NV18-x2.yaml"
    assert report["path"] == str(path) and [entry.name for entry in cache.iterdir()] == [path.name]
    found, ignored = machine.find("auto", HERE)
    assert found == load(str(path)) and not ignored and found.key == HERE and found.name == path.stem
    assert found.source["records"] == [layer["name"] for layer in tune.LAYERS if layer["name"] != "olmoe"]
    for rate in ("block_us", "torch_block_us", "nccl_us", "place_gbs", "return_us", "gather_gbs"):
        assert getattr(found.rates, rate) == pytest.approx(getattr(gpus.truth.rates, rate), rel=0.1), rate
    assert report["left_out"]["layer"] == "olmoe" and report["left_out"]["error"] == found.left_out_error < 0.05
    ratios = [ratio for stage in report["left_out"]["predicted_over_measured"].values() for ratio in stage.values()]
    assert len(ratios) == 17 and max(abs(ratio - 1) for ratio in ratios) == pytest.approx(
        found.left_out_error, abs=1e-3
    )


def test_an_error_of_the_left_out_layer_is_kept(gpus, capsys, monkeypatch):
    measure = tune.measure

    def one_is_slow(*arguments):
        records, link_gbs = measure(*arguments)
        (record,) = (record for record in records if record["shape"]["name"] == "olmoe")
        record["times_ms"]["down: overlap"]["median"] *= 2
        return records, link_gbs

    monkeypatch.setattr(tune, "measure", one_is_slow)
    assert cli.main(["tune"]) == 0
    assert "olmoe, which the fit has not seen, is predicted within 50%, others within" in capsys.readouterr().out
    found, _ = machine.find("auto", HERE)
    assert found.error == found.left_out_error == pytest.approx(0.5, abs=0.02) and found.margin > 2.8


@pytest.mark.parametrize(
    "others,expected",
    [
        (lambda name: {8: 0.9, 16: 0.8}, 16),
        (lambda name: {8: 0.9, 16: 1.01 if name == "mixtral" else 0.5}, 8),
        (lambda name: {8: 0.99, 16: 1.2}, 0),
        (lambda name: {8: 0.9} if name == "mixtral" else {8: 0.9, 16: 0.5}, 8),
    ],
    ids=["faster", "once slower", "noise", "once not measured"],
)
def test_settings_that_were_never_slower(others, expected):
    records = [
        {"times_ms": {f"arm {setting}": {"median": ratio} for setting, ratio in {0: 1.0, **others(name)}.items()}}
        for name in ("trans-xl", "olmoe", "mixtral")
    ]
    assert fit.never_slower(records, 0, lambda record: "arm") == expected


def test_settings_of_the_profile(gpus):
    """Of couriers with SMs of their own, and of segments."""
    gpus.settings = lambda name: (("comm_sms", 0, {8: 0.9}), ("segments", SEGMENT_BYTES, {4 * SEGMENT_BYTES: 0.9}))
    gpus.layers = [layer for layer in tune.LAYERS if layer["name"] in ("trans-xl", "olmoe", "mixtral")]
    assert cli.main(["tune"]) == 0
    found, _ = machine.find("auto", HERE)
    assert (found.comm_sms, found.segment_bytes) == (8, 4 * SEGMENT_BYTES)


def test_out(gpus, tmp_path, capsys, cache):
    gpus.layers, path = tune.LAYERS[:3], tmp_path / "folder" / "mine.yaml"
    assert cli.main(["tune", "--out", str(path)]) == 0 and not cache.exists()
    assert f"{path}: written" in capsys.readouterr().out
    before = path.read_bytes()
    assert cli.main(["tune", "--out", str(path)]) == 2 and path.read_bytes() == before
    assert "exists already" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(gpus, tmp_path, capsys):
    gpus.layers = tune.LAYERS[:3]
    (tmp_path / "file").touch()
    assert cli.main(["tune", "--out", str(tmp_path / "file" / "mine.yaml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ds-tileoverlap: tune: ") and "file" in line


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs")
def test_without_gpus(capsys):
    assert cli.main(["tune"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "ds-tileoverlap: tune: needs 2 GPUs that write into each other's memory, found 0"


@pytest.mark.parametrize(
    "arguments,words",
    [(["--ranks", "1"], "--ranks: got 1, expected at least 2"), (["--limit", "nan"], "--limit: got nan, expected")],
)
def test_wrong_usage(capsys, arguments, words):
    assert cli.main(["tune", *arguments]) == 2 and words in capsys.readouterr().err


def test_without_scipy(capsys, monkeypatch):
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    assert cli.main(["tune"]) == 2 and "scipy is not installed" in capsys.readouterr().err


# --- the ranks that measure -------------------------------------------------------------------------------------------


def ranks_that(monkeypatch, program):
    """In place of the launcher and its ranks, a program."""
    popen = tune.subprocess.Popen
    monkeypatch.setattr(
        tune.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", program], **options)
    )


RECORDS = """
import json
print("some words")
print(json.dumps({"link_gbs": 123.0}), flush=True)
for i in range(%d):
    record = {"shape": {"name": f"layer {i}"}, "gate": {"passed": %s}}
    print(json.dumps({"record": record}), flush=True)
"""


def test_records_come_with_their_progress(capsys, monkeypatch):
    ranks_that(monkeypatch, RECORDS % (4, True))
    records, link_gbs = tune.measure(2, 120.0)
    assert [record["shape"]["name"] for record in records] == [f"layer {i}" for i in range(4)] and link_gbs == 123
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"measured layer {i}, {i + 1} of {len(tune.LAYERS)}" for i in range(4)]


@pytest.mark.parametrize(
    "program,words",
    [
        (RECORDS % (3, True), "3 layers were measured in 120 s, fewer than 4; --limit gives more time"),
        (RECORDS % (5, False), "wrong for layer 0, layer 1, "),
        (
            "import json; print(json.dumps({'refusal': 'no peer access'}))",
            "these GPUs cannot overlap, as no peer access",
        ),
        (RECORDS % (4, True) + "raise ValueError('out of everything')", "failed: ValueError: out of everything"),
        ("raise SystemExit(3)", "the measurement failed: no message"),
    ],
    ids=["too few", "wrong results", "refused", "failed", "silent"],
)
def test_ranks_that_do_not_measure(monkeypatch, program, words):
    ranks_that(monkeypatch, program)
    with pytest.raises(tune.TuneError, match=words):
        tune.measure(2, 120.0)


def test_ranks_that_do_not_end(monkeypatch):
    ranks_that(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(tune, "START_S", 0.1)
    monkeypatch.setattr(tune, "END_S", 0.1)
    with pytest.raises(tune.TuneError, match="did not end within 0 s"):
        tune.measure(2, 0.1)


def test_ranks_get_as_many_experts(monkeypatch):
    given = []
    monkeypatch.setattr(tune, "messages", lambda ranks, options, limit_s: given.extend(options) or [])
    with pytest.raises(tune.TuneError, match="0 layers"):
        tune.measure(6, 1.0)
    layers = json.loads(given[given.index("--layers") + 1])
    assert {layer["name"]: layer["experts"] for layer in layers} == {
        "trans-xl": 30, "olmoe": 60, "qwen3-30b": 126, "paper-like": 30, "mixtral": 6, "dsv3-like": 60,
    }  # fmt: skip


def test_segments_are_arms_too(monkeypatch):
    """2 MiB are 16 bands of 128 rows of 1 KiB; a stage ends when rows are there, not when all tokens are summed."""
    calls, plan = [], balanced(Shape(512, 256, 8, 2, 64), 2).but(slots=torch.zeros(64, 2))
    monkeypatch.setattr(overlap_stages, "return_while_computed", lambda *arguments: calls.append(arguments))
    stages = object.__new__(tune_worker.StagesWithSegments)
    stages.plan, stages.rank, stages.width = plan, 0, 512
    monkeypatch.setattr(stages, "plan_of", lambda how: plan.but(returns=how), raising=False)
    monkeypatch.setattr(stages, "run_of", lambda plan, width, returns, num_sms=0: returns, raising=False)
    arms = stages.return_only_arms(SimpleNamespace(width=512), torch.zeros(4), (0, 8))
    segments = [f"segments {SEGMENT_BYTES // 2 << i}" for i in range(3)]
    assert list(arms) == ["serial", "rows 0", "rows 8", "sums 0", "sums 8", *segments]
    for name in segments:
        arms[name]()
    for (_, its_plan, returns, _, home), bands in zip(calls, (8, 16, 32), strict=True):
        assert its_plan.returns == returns and (returns.sums, returns.bands_per_segment) == (False, bands)
        assert its_plan.slots.shape == (1, 2) and home == "combine"


@pytest.mark.gpu(2)
def test_these_gpus(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    assert cli.main(["tune", "--json", "--ranks", "2", "--limit", "60", "--out", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    found, ignored = machine.find(str(path), machine.describe(2))
    assert found.link_gbs > 10 and not ignored and len(report["layers"]) >= tune.LEAST_LAYERS
    assert found.error < 0.5, report["left_out"]


# --- which profile holds ----------------------------------------------------------------------------------------------


def test_the_package_knows_its_gpu():
    found, ignored = machine.find("auto", HERE)
    assert found == load(DEFAULT) and not ignored
    for other in ({"device": "NVIDIA H100"}, {"link": "PIX"}, {"ranks": 4}):
        assert machine.find("auto", {**HERE, **other}) == (None, [])


def test_none_is_none(cache, profile):
    write(replace(profile, key=HERE), machine.path_of(HERE))
    assert machine.find("none", HERE) == (None, [])


@pytest.mark.parametrize("name,value", [("driver", "601.0"), ("torch", "2.12.0"), ("ds_tileoverlap", "0.2.0")])
def test_a_profile_of_other_software_is_ignored(profile, name, value):
    path = machine.path_of(HERE)
    write(replace(profile, name="mine", key=HERE), path)
    assert machine.find("auto", HERE)[0].name == "mine"
    found, (line,) = machine.find("auto", {**HERE, name: value})
    assert found == profile
    assert line.startswith(f"profile {path} is ignored, as its {name} was {HERE[name]}, is {value};")


@pytest.mark.parametrize(
    "content,words",
    [
        (b"", "got version None, expected 2; measure again"),
        (b"version: 1\nname: old", "got version 1, expected 2; measure again"),
        (b"\x00\xff\x13", "unacceptable character"),
        (b"version: 2\nname: [", "while parsing"),
        (b"version: 2\n? [a]\n: b", "found unhashable key"),
        ((FOLDER / f"{DEFAULT}.yaml").read_bytes()[:-24], "in place of host_return_us"),
        ((FOLDER / f"{DEFAULT}.yaml").read_bytes().replace(b"item_us: 1", b"item_us: x1"), "item_us: got 'x1"),
        ((FOLDER / f"{DEFAULT}.yaml").read_bytes().replace(b"link_us: 0.0", b"link_us: .nan"), "link_us: got nan"),
        ((FOLDER / f"{DEFAULT}.yaml").read_bytes().replace(b"  ranks: 2\nsource", b"  rank: 2\nsource"), "key: got"),
    ],
)
def test_a_file_that_is_no_profile_is_ignored(profile, content, words):
    path = machine.path_of(HERE)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    found, (line,) = machine.find("auto", HERE)
    assert found == profile and "\n" not in line
    assert line.startswith(f"profile {path}: ") and words in line and line.endswith("; it is ignored")


def test_a_file_of_the_ds_config(tmp_path, profile):
    path = tmp_path / "mine.yaml"
    write(replace(profile, name="mine"), path)
    assert machine.find(str(path), HERE) == (replace(profile, name="mine"), [])
    found, (line,) = machine.find(str(path), {**HERE, "link": "PIX"})
    assert found is None and f"profile {path} is ignored, as its link was NV18, is PIX" in line
    found, (line,) = machine.find(str(tmp_path / "none.yaml"), HERE)
    assert found is None and "none.yaml" in line and "it is ignored" in line


def test_a_write_that_fails_leaves_what_was_there(tmp_path, profile, monkeypatch):
    path = tmp_path / "mine.yaml"
    write(profile, path)

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr("ds_tileoverlap.appearing.os.replace", fail)
    with pytest.raises(OSError, match="full"):
        write(replace(profile, name="other"), path)
    assert load(str(path)) == profile and [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    "value,expected", [("/given", "/given"), ("relative", "/home/me/.cache"), ("", "/home/me/.cache")]
)
def test_where_profiles_lie(monkeypatch, value, expected):
    """As the XDG rules have it, a relative folder counts for nothing."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/me")
    assert machine.path_of(H200) == Path(expected) / "ds_tileoverlap" / "NVIDIA-H200-NV18-x2.yaml"


def test_the_link_in_a_topology():
    """As nvidia-smi prints it: a header with escape codes, network cards among the columns, a legend."""
    topology = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPXB\t0-47\t0\n"
        "GPU1\tNV18\t X \tSYS\t48-95\t1\n"
        "NIC0\tPXB\tSYS\t X \n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    assert machine.link_of(topology) == "NV18"
    assert machine.link_of(topology.replace("GPU1\tNV18", "GPU1\tSYS")) == "NV18,SYS"
    assert machine.link_of("") == "unknown"


def test_this_machine_is_one_that_a_file_can_name(profile, tmp_path):
    here = machine.describe(2)
    write(replace(profile, key=here), tmp_path / "mine.yaml")
    assert machine.find(str(tmp_path / "mine.yaml"), machine.describe(2))[0].key == here


# --- who says which it is ---------------------------------------------------------------------------------------------


def test_plan_takes_the_profile_of_this_machine(gpus, capsys, profile):
    plan = ["plan", "--shape", "H=2048,I=768,E=128,k=8,tokens=8192", "--ranks", "2", "--json"]

    def name():
        assert cli.main(plan) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out)["profile"]["name"], captured.err

    assert name() == (DEFAULT, "")
    write(replace(profile, name="mine", key=HERE), machine.path_of(HERE))
    assert name() == ("mine", "")
    write(replace(profile, name="mine", key={**HERE, "driver": "1"}), machine.path_of(HERE))
    found, said = name()
    assert found == DEFAULT and "is ignored, as its driver was 1, is 600.1" in said and said.count("\n") == 1


def test_doctor_names_the_profile(gpus, profile, monkeypatch):
    check = doctor._profile()
    assert check.status == "ok" and check.detail.startswith(f"{DEFAULT}, measured 2026-11-30 with torch 2.11.0+cu130")
    write(replace(profile, name="mine", key={**HERE, "driver": "1"}), machine.path_of(HERE))
    assert "is ignored, as its driver was 1, is 600.1" in doctor._profile().detail
    monkeypatch.setattr(machine, "describe", lambda num_ranks: {**HERE, "device": "NVIDIA H100"})
    check = doctor._profile()
    assert check.status == "no" and "none for 2 such GPUs" in check.detail and "tune measures one" in check.detail
