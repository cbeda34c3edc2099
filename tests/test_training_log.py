"""What a training job says: a line every so many steps, a traced step, DeepSpeed's monitors; ds-tileoverlap trace."""

import contextlib
import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch
from engines import EXPERTS, TOKENS, engine_of, net_of, train
from models import Gated, fill, stock, tanh_mlp, tokens
from models import ours as converted

from ds_tileoverlap import cli, stages
from ds_tileoverlap.route import Routing
from ds_tileoverlap.trace import perfetto
from ds_tileoverlap.trace.session import MAX_LAYERS

SEQUENTIAL = ["moe", "route", "layout", "dispatch", "expert_gemm", "combine"]


def _said(options, steps, layers=2, monitor=None, accumulate=1, loaded=0, **net):
    """What this rank prints of a training, and each layer's counts of this rank in the last forward.

    Args:
        loaded: steps of the checkpoint that the job begins with.
    """
    config = {"tile_overlap": {"enabled": True, "backend": "sequential", **options}}
    if monitor:
        config["csv_monitor"] = {"enabled": True, "output_path": monitor, "job_name": "job"}
    net = net_of(2, layers, **net)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = engine_of(net, "sequential", gradient_accumulation_steps=accumulate, **config)
        engine.global_steps = loaded
        train(engine, range(steps * accumulate))
    counts = torch.stack([layer.deepspeed_moe.exp_counts.cpu() for layer in net.layers])
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("tile_overlap: ")]
    return lines[1:], counts.double()


def steps_of(lines):
    return [int(re.match(r"tile_overlap: step (\d+): ", line)[1]) for line in lines]


def test_a_line_every_so_many_steps(two_ranks, tmp_path):
    (lines, counts), (silent, others) = two_ranks(_said, {"log_every": 2}, 4, 2, str(tmp_path))
    assert not silent and steps_of(lines) == [2, 4]
    counts += others
    load = counts.max(1).values / counts.mean(1)
    fullest = int(load.argmax())
    expected = f"fullest expert {load[fullest]:.2f} times the mean ('layers.{fullest}'), 0.00% dropped"
    assert lines[-1] == f"tile_overlap: step 4: {expected}"
    assert values_of(tmp_path, "expert_load")[1] == pytest.approx(load.max().item())
    assert values_of(tmp_path, "drop_rate") == [0, 0]


def values_of(folder, name):
    (path,) = Path(folder).glob(f"job/Train_MoE_{name.replace('/', '_')}.csv")
    header, *rows = list(csv.reader(path.open()))
    assert header == ["step", name.split("/")[-1]]
    return [float(value) for _, value in rows]


def test_no_line_unless_asked(two_ranks):
    assert [lines for lines, _ in two_ranks(_said, {}, 3)] == [[], []]


def test_a_job_that_goes_on_counts_on(two_ranks):
    (lines, _), _ = two_ranks(_said, {"log_every": 3}, 3, 1, None, 1, 7)
    assert steps_of(lines) == [9]


def _dropped():
    return _said({"log_every": 1}, 1, 2, drop_tokens=True, capacity_factor=0.5, min_capacity=1, k=1)


def test_what_is_dropped_is_said(two_ranks):
    """The mean over the layers; each expert takes half of an even share."""
    (lines, chosen), _ = two_ranks(_dropped)
    assert chosen.sum(1).tolist() == [TOKENS, TOKENS]
    capacity = -(-TOKENS // (2 * EXPERTS))
    first, second = (chosen - capacity).clamp_min(0).sum(1) / TOKENS
    assert first > 0 and second > 0 and lines[0].endswith(f", {(first + second) / 2:.2%} dropped")


def test_routing_by_hand():
    class Two:
        rank = 1

    # Two ranks, three experts; then what goes to each rank, and whether it can overlap.
    counts = torch.tensor([[4, 0, 2, 4, 2, 0], [1, 1, 4, 2, 4, 0]], dtype=torch.int32)
    routing = Routing(counts, Two, 8)
    assert routing.load == pytest.approx(6 / 4) and routing.dropped == pytest.approx(0.25)
    assert Routing(torch.zeros_like(counts), Two, 0).dropped == 0


def test_a_traced_step(two_ranks, tmp_path):
    options = {"log_every": 3, "trace": {"step": 1, "folder": str(tmp_path / "there")}}
    (lines, _), (silent, _) = two_ranks(_said, options, 3, 2, str(tmp_path), 2)
    assert not silent and len(lines) == 2 and lines[0].endswith(f"{tmp_path}/there/trace.json.gz")
    assert "tile_overlap: trace: sequential on 2 ranks: overlap ratio 0.00, exposed " in lines[0]
    assert lines[1].endswith("dropped, overlap ratio 0.00 when traced")
    facts = perfetto.read(tmp_path / "there" / "trace.json.gz")["otherData"]
    calls = {each["stage"]: each["calls"] for each in facts["stages"] if each["rank"] == 1}
    # Two layers, two micro-batches of one step.
    assert all(calls[name] == 4 for name in SEQUENTIAL) and calls["expert_gemm weight gradients"] == 8
    assert values_of(tmp_path, "exposed_us") == [facts["exposed_us"]] and values_of(tmp_path, "overlap_ratio") == [0]
    times = [each["time_us"] for each in facts["stages"] if each["rank"] == 0 and each["stage"] == "dispatch"]
    assert values_of(tmp_path, "dispatch/time_us") == times
    assert not list(tmp_path.glob("job/*_efficiency.csv")), "what is not there is no number"
    assert (tmp_path / "there" / "trace.png").exists()


def test_a_traced_step_of_a_deep_model(two_ranks, tmp_path):
    two_ranks(_said, {"trace": {"step": 1, "folder": str(tmp_path)}}, 2, MAX_LAYERS + 1)
    facts = perfetto.read(tmp_path / "trace.json.gz")["otherData"]
    assert facts["layers"] == [f"layers.{i}" for i in range(MAX_LAYERS)]


def test_a_folder_that_cannot_be_written(two_ranks, tmp_path):
    (tmp_path / "file").touch()
    (lines, _), _ = two_ranks(_said, {"trace": {"step": 1, "folder": str(tmp_path / "file")}}, 3)
    assert len(lines) == 1 and "trace: not written" in lines[0]


@pytest.mark.parametrize(
    "form,backward",
    [
        (
            Gated,
            ["combine backward", "expert_gemm backward", "dispatch backward", *["expert_gemm weight gradients"] * 2],
        ),
        (tanh_mlp, ["combine backward", "dispatch backward"]),
    ],
    ids=["known", "as it is"],
)
def test_ranges_of_the_sequential_backend(monkeypatch, form, backward):
    names, open_ranges = [], []

    class Accelerator:
        @staticmethod
        def range_push(name):
            names.append(name)
            open_ranges.append(name)

        @staticmethod
        def range_pop():
            open_ranges.pop()

    monkeypatch.setattr(stages, "get_accelerator", lambda: Accelerator)
    layer = converted(fill(stock(form())))
    x = tokens(0, 20).requires_grad_()
    y = layer(x)[0]
    assert names == SEQUENTIAL and not open_ranges
    y.sum().backward()
    assert names[len(SEQUENTIAL) :] == backward and not open_ranges


def test_command(tmp_path, capsys):
    shape = ["--shape", "H=32,I=16,E=4,k=2,tokens=64"]
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"tile_overlap": {"recompute_dispatch": True}}))
    arguments = ["trace", *shape, "--ranks", "2", "--config", str(config), "--out", str(tmp_path / "out"), "--json"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert facts["backend"] == "sequential" and facts["clock"] == "host" and facts["ranks"] == [0, 1]
    assert {"dispatch", "dispatch again"} <= {each["stage"] for each in facts["stages"]}
    assert "sequential instead of overlap, as the layer runs on cpu" in captured.err
    assert f"{config}: tile_overlap.enabled is false; what follows is with true" in captured.err
    assert perfetto.read(tmp_path / "out" / "trace.json.gz")["otherData"] == facts
    assert cli.main(arguments) == 2 and "trace.json.gz exists already" in capsys.readouterr().err
    config.write_text("[1]")
    assert cli.main(arguments) == 2 and f"{config}: got [1], expected an object" in capsys.readouterr().err


def test_ranks_that_fail_say_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "no such thing")
    shape = "H=32,I=16,E=4,k=2,tokens=64"
    assert cli.main(["trace", "--shape", shape, "--ranks", "2", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "the 2 ranks failed: ValueError: DS_ACCELERATOR" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "shape,more,fault",
    [
        ("H=32,I=16,E=4,k=2,tokens=64", ["--ranks", "3"], "--ranks: got 3, expected at least 1 and a divisor of the 4"),
        ("H=32,I=16,E=4,k=5,tokens=64", ["--ranks", "2"], "k: got 5, expected at most the 4 experts"),
        ("H=32,I=16,E=4,k=2,tokens=0", ["--ranks", "2"], "tokens: got 0, expected at least 1"),
        ("H=32,I=16,E=4,k=2,tokens=64", ["--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_usage(tmp_path, capsys, shape, more, fault):
    assert cli.main(["trace", "--shape", shape, "--out", str(tmp_path), *more]) == 2
    assert fault in capsys.readouterr().err and not list(tmp_path.iterdir())
