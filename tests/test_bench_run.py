"""``bench run`` on two CPU ranks, as users start it: records, exit codes, and no time where the gate is red."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from launched import ROOT, run

from ds_tileoverlap import cli
from ds_tileoverlap.arguments import UsageError
from ds_tileoverlap.bench import command, options, records
from ds_tileoverlap.bench.shapes import LayerShape, StageShape, read_shapes

TINY = ROOT / "configs" / "benchmark_tiny.yaml"
GOLDEN = Path(__file__).with_name("bench_run_schema.json")


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def bench_run(kind, out, *more, shapes=TINY):
    return cli.main(["bench", "run", kind, "--shapes", str(shapes), "--out", str(out), *map(str, more)])


def schema(value):
    """The same, with types in the place of values."""
    if isinstance(value, dict):
        return {key: schema(each) for key, each in value.items()}
    return [schema(each) for each in value] if isinstance(value, list) else type(value).__name__


def test_layer(on_cpu, tmp_path, capfd):
    assert bench_run("layer", tmp_path, "--arms", "stock,autoep_fused,sequential", "--samples", 1, "--json") == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert "a smoke test on CPU, not a result" in err
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert found["records"] == {"tiny": record}
    again = f"--shapes {TINY} --samples 1 --arms stock,autoep_fused,sequential --ranks 2"
    assert record["environment"]["command"] == f"ds-tileoverlap bench run layer {again}"
    for optional in ("commit", "transformers"):
        found["records"]["tiny"]["environment"].pop(optional, None)
    assert schema(found) == json.loads(GOLDEN.read_text())


def test_step(on_cpu, tmp_path):
    assert bench_run("step", tmp_path, "--arms", "sequential,ours,ours_autoep", "--layers", 1, "--samples", 1) == 0
    record = json.loads((tmp_path / "step-tiny.json").read_text())
    assert record["gate"]["passed"] and record["gate"]["ours_vs_sequential"] <= 1e-6 and record["layers"] == 1
    assert record["step_ms"].keys() == record["first_losses"].keys() == {"sequential", "ours"}
    assert record["skipped"].keys() == {"ours_autoep"}


BROKEN = """
import importlib, sys, torch
from ds_tileoverlap.bench import worker

benchmark = importlib.import_module("ds_tileoverlap.bench." + sys.argv[1])
native = benchmark.native

def other_weights(*arguments):
    layer = native(*arguments)
    if arguments[-1] == "auto":
        with torch.no_grad():
            for parameter in layer.deepspeed_moe.experts.parameters():
                parameter.mul_(1.5)
    return layer

benchmark.native = other_weights
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind,name,times", [("layer", "tiny", "arms"), ("step", "step-tiny", "step_ms")])
def test_no_time_on_a_red_gate(on_cpu, tmp_path, monkeypatch, capfd, kind, name, times):
    (tmp_path / "broken_worker.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(command, "WORKER", "broken_worker")
    out = tmp_path / "out"
    assert bench_run(kind, out, "--arms", "stock,ours", "--samples", 1) == 1
    assert "equality gate FAILED, nothing timed" in capfd.readouterr().out
    record = json.loads((out / f"{name}.json").read_text())
    assert record["gate"]["passed"] is False and record[times] == {}


def test_a_shape_that_takes_too_long(on_cpu, tmp_path, capfd):
    # One rank: two would write their stacks into each other's.
    more = ("--arms", "sequential", "--samples", 10**6, "--limit", 2, "--ranks", 1, "--json")
    assert bench_run("layer", tmp_path, *more) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["records"] == {}
    # Where it is then, on a slow machine even before the first sample, is told by the stack.
    assert "Timeout (0:00:02)!" in err and "in _run" in err


def test_ranks_that_do_not_end(on_cpu, tmp_path, monkeypatch, capfd):
    (tmp_path / "asleep.py").write_text("import time; print('asleep', flush=True); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(command, "WORKER", "asleep")
    monkeypatch.setattr(command, "START_LIMIT_S", 7)
    assert bench_run("layer", tmp_path / "out", "--ranks", 1, "--limit", 1) == 1
    out, err = capfd.readouterr()
    assert "asleep" in out and "1 ranks did not end in 8 s" in err


def test_the_entry_for_torchrun(on_cpu, tmp_path):
    entry = [str(ROOT / "examples" / "benchmark.py"), "--shapes", str(TINY), "--arms", "sequential,chunks_2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, output = run([*torchrun, *entry, "--samples", "1", "--out", str(tmp_path)], 300)
    assert code == 0, output
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert record["arms"].keys() == {"sequential", "chunks_2", "ours"} and record["gate"]["passed"]
    assert record["environment"]["command"].startswith("ds-tileoverlap bench run layer --shapes")


@pytest.mark.gpu(2)
def test_stages(tmp_path):
    more = ("--ranks", 2, "--samples", 1, "--comm-sms", "0,8", "--launch")
    assert bench_run("stages", tmp_path, *more) == 0
    (benchmark,) = records.read(tmp_path)
    assert {"in", "down", "down back", "in back"} == benchmark.runs[0].measures.keys()
    assert {"rows 0", "sums 8"} <= benchmark.runs[0].measures["down"].keys()


USAGE = {
    "arm": (("--arms", "stock,other"), "--arms: got other, expected of stock, autoep"),
    "chunks": (("--arms", "chunks_0"), "--arms: got chunks_0"),
    "shape": (("--only", "tiny,huge"), "--only: got huge, expected names of"),
    "ranks": (("--ranks", 3), "experts: got 8, expected a multiple of the number of ranks, 3"),
    "samples": (("--samples", 0), "got '0', expected an integer of at least 1"),
}


@pytest.mark.parametrize("more,words", USAGE.values(), ids=USAGE)
def test_wrong_usage(on_cpu, tmp_path, monkeypatch, capfd, more, words):
    monkeypatch.setattr(command, "running", lambda *_, **__: pytest.fail("started ranks"))
    try:
        code = bench_run("layer", tmp_path / "out", *more)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and words in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind,name", [("layer", "tiny"), ("step", "step-tiny")])
def test_records_are_not_overwritten(on_cpu, tmp_path, monkeypatch, capfd, kind, name):
    monkeypatch.setattr(command, "running", lambda *_, **__: pytest.fail("started ranks"))
    record = tmp_path / f"{name}.json"
    record.write_text("{}")
    assert bench_run(kind, tmp_path) == 2 and f"--out: {record} exists already" in capfd.readouterr().err
    assert record.read_text() == "{}"


def test_stages_need_gpus(on_cpu, tmp_path, capfd):
    assert bench_run("stages", tmp_path / "out") == 2
    assert "got no GPU, expected Hopper GPUs" in capfd.readouterr().err


def test_more_ranks_than_gpus(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert bench_run("layer", tmp_path / "out", "--ranks", 4) == 2
    assert "--ranks: got 4, expected at most the number of GPUs, 2" in capfd.readouterr().err


def test_every_fault_of_a_list_of_shapes(tmp_path):
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "- {name: a/b, hidden: 64, intermediate: 9.5, experts: 8, top_k: 2, tokens: 128, skew: 0.5}\n"
        "- {name: x, hidden: true, experts: 8, top_k: 9}\n"
        "- {name: x, hidden: 1, intermediate: 1, experts: 7, top_k: 8, tokens: 1, rank_spread: 1}\n"
        "- {name: y, hidden: 1, intermediate: 1, experts: 7, top_k: 8, tokens: 1}\n"
    )
    with pytest.raises(UsageError) as raised:
        read_shapes(path, LayerShape, 2)
    keys = "name, hidden, intermediate, experts, top_k, tokens, router_spread, rank_spread"
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == [
        f"shape 1: skew: not one of {keys}",
        "shape 1: name: got 'a/b', expected letters, digits, - and _",
        "shape 1: intermediate: got 9.5, expected an integer of at least 1",
        "shape 2: intermediate: missing",
        "shape 2: tokens: missing",
        "shape 2: hidden: got True, expected an integer of at least 1",
        "shape 3: rank_spread: got 1, expected a number from 0, below 1",
        "shape 4: experts: got 7, expected a multiple of the number of ranks, 2",
        "shape 4: top_k: got 8, expected at most the number of experts, 7",
        "name: got x 2 times, expected once",
    ]


@pytest.mark.parametrize(
    "text", ["", "- 3", "a: 1", "[", None], ids=["empty", "no shape", "no list", "no YAML", "none"]
)
def test_a_file_that_is_no_list_of_shapes(tmp_path, text):
    path = tmp_path / "shapes.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=f"--shapes: {path}"):
        read_shapes(path, LayerShape, 2)


LISTS = {
    LayerShape: ("benchmark_shapes", "benchmark_tokens", "benchmark_experts", "benchmark_tiny", "paper_models"),
    StageShape: ("benchmark_stages", "benchmark_tiny", "paper_stages"),
}


@pytest.mark.parametrize("kind,name", [(kind, name) for kind, names in LISTS.items() for name in names])
def test_the_lists_of_configs(kind, name):
    assert read_shapes(ROOT / "configs" / f"{name}.yaml", kind, 2)


@pytest.mark.parametrize(
    "kind,text",
    [
        ("layer", "--shapes F --out O --only a,b --arms ours,chunks_4 --limit 9 --breakdown"),
        ("stages", "--shapes F --out O --comm-sms 0,2 --launch"),
        ("step", "--shapes F --out O --samples 3 --layers 12"),
        ("step", "--shapes F --out O"),
    ],
)
def test_options_survive_the_way_to_the_ranks(kind, text):
    parser = argparse.ArgumentParser()
    options.add_options(parser, kind)
    given = parser.parse_args(text.split())
    words = options.words(kind, given)
    assert sorted(words) == sorted(text.split()) and parser.parse_args(words) == given
