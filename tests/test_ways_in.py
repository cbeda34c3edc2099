"""The ways into the package: the class, ``initialize`` on a stock model, and a launcher that changes no code."""

import copy
import inspect
import json
import pickle
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from launched import ROOT, launcher
from launched import run as run_program
from models import E, H, LoRA, assert_close, backward_of, fill, mlp, ours, stock, tokens
from torch import nn

import ds_tileoverlap
from ds_tileoverlap import MoE, configure, run
from ds_tileoverlap.exchange import HostCopy
from ds_tileoverlap.layer import TileMOELayer

# The first start of DeepSpeed on a machine compiles its shared-memory collectives, which takes minutes.
LIMIT_S = 300


def describe(module):
    return {name: (value.shape, value.dtype) for name, value in module.state_dict().items()}


def assert_tagged(layer):
    """C28: expert parameters carry DeepSpeed's two marks, no other parameter does."""
    for name, parameter in layer.named_parameters():
        marks = {key: getattr(parameter, key) for key in ("allreduce", "group_name") if hasattr(parameter, key)}
        expected = {"allreduce": False, "group_name": layer.expert_group_name} if ".experts." in name else {}
        assert marks == expected, name


# --- the class


def test_signature_is_deepspeeds():
    def arguments(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert arguments(MoE.__init__) == arguments(StockMoE.__init__)
    assert arguments(MoE.forward) == arguments(StockMoE.forward)


def test_class_is_found_by_type():
    layer = MoE(H, mlp(), E)
    assert isinstance(layer, StockMoE) and isinstance(layer.deepspeed_moe, MOELayer)
    assert deepspeed.moe.utils.has_moe_layers(nn.Sequential(layer)) == (True, E)
    for name in ("ep_size", "num_experts", "num_local_experts", "expert_group_name", "use_residual"):
        assert getattr(layer, name) == getattr(StockMoE(H, mlp(), E), name)


@pytest.mark.parametrize("use_residual", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_c14_state_dict(k, use_residual):
    layer, theirs = (kind(H, mlp(), E, ep_size=2, k=k, use_residual=use_residual) for kind in (MoE, StockMoE))
    assert list(describe(layer).items()) == list(describe(theirs).items())
    backward_of(one := fill(MoE(H, mlp(), E, k=k, use_residual=use_residual)), tokens(0, 9), tokens(1, 9))
    assert describe(one) == describe(StockMoE(H, mlp(), E, k=k, use_residual=use_residual))


@pytest.mark.parametrize("use_residual", [False, True])
def test_class_computes_what_deepspeed_does(use_residual):
    options = dict(k=2, use_residual=use_residual, top2_2nd_expert_sampling=False, drop_tokens=False)
    layer, theirs = (fill(kind(H, mlp(), E, **options)) for kind in (MoE, StockMoE))
    x, grad = tokens(1, 3, 11), tokens(2, 3, 11)
    assert_close(backward_of(layer, x, grad), backward_of(theirs, x, grad))


def _order_of(layer, monkeypatch):
    """In which order a residual layer's dense part is called and the counts are waited for."""
    order, wait = [], HostCopy.wait
    for name in ("mlp", "coefficient"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: order.append(name))
    monkeypatch.setattr(HostCopy, "wait", lambda self: order.append("counts") or wait(self))
    layer(tokens(1, 9))
    return order


@pytest.mark.parametrize("converted", [False, True], ids=["class", "converted"])
def test_a_dense_part_runs_while_the_counts_are_on_their_way(converted, monkeypatch):
    layer = fill((StockMoE if converted else MoE)(H, mlp(), E, k=2, use_residual=True, drop_tokens=False))
    dense = layer.mlp
    configure(layer, {"tile_overlap": {"enabled": True}})
    assert _order_of(layer, monkeypatch) == ["mlp", "coefficient", "counts"]
    assert layer.mlp is dense and "mlp" not in vars(layer)
    monkeypatch.setattr(layer, "coefficient", nn.Linear(H + 1, 2))
    with pytest.raises(RuntimeError):
        layer(tokens(1, 9))
    assert layer.mlp is dense, "after an error too"
    configure(layer, {"tile_overlap": {"enabled": False}})
    assert type(layer) is (StockMoE if converted else MoE)


def test_random_numbers_of_a_dense_part_are_drawn_after_those_of_the_experts(monkeypatch):
    expert, options = nn.Sequential(*mlp(), nn.Dropout(0.5)), dict(k=1, use_residual=True, drop_tokens=False)
    layer, theirs = (fill(kind(H, expert, 1, **options)) for kind in (MoE, StockMoE))
    x, found = tokens(1, 9), []
    for each in (layer, theirs):
        torch.manual_seed(7)
        found.append(each(x)[0])
    torch.testing.assert_close(*found)
    assert _order_of(layer, monkeypatch) == ["counts", "mlp", "coefficient"]


def test_wrong_arguments_in_one_error():
    with pytest.raises(ValueError) as error:
        MoE(0, mlp(), num_experts=4, ep_size="2", k=5)
    message = str(error.value)
    assert "hidden_size: got 0, expected" in message
    assert "ep_size: got '2', expected" in message
    assert "k: got 5, expected an integer from 1 to num_experts = 4" in message


@pytest.mark.parametrize("make", [MoE, StockMoE])
def test_a_layer_over_ranks_needs_their_group(make):
    layer = make(H, mlp(), E, ep_size=2, k=2)
    configure(layer, {"tile_overlap": {"enabled": True}})
    with pytest.raises(
        RuntimeError, match=r"ep_size = 2 ranks, .* call deepspeed.initialize, or .*parallelism\(\), first"
    ):
        layer(tokens(0, 5))


CHANGES = {
    "construction": lambda layer: layer,
    "to": lambda layer: layer.to(torch.bfloat16),
    "half": lambda layer: layer.half(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()) and layer,
    "load_state_dict assign": lambda layer: layer.load_state_dict(copy.deepcopy(layer).state_dict()) and layer,
    "forward": lambda layer: layer(tokens(0, 5)) and layer,
}


@pytest.mark.parametrize("converted", [False, True], ids=["class", "converted"])
@pytest.mark.parametrize("use_residual", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_c28_tags(change, use_residual, converted):
    layer = (StockMoE if converted else MoE)(H, mlp(), E, ep_size=1, k=2, use_residual=use_residual)
    configure(layer, {"tile_overlap": {"enabled": True}})
    assert_tagged(CHANGES[change](layer))


def _lora_tags_worker(ep_size):
    layer = MoE(H, mlp(), E, ep_size=ep_size, k=2)
    for expert in layer.deepspeed_moe.experts.deepspeed_experts:
        expert[0] = LoRA(expert[0])
    layer.set_deepspeed_parallelism()
    assert_tagged(layer)
    assert sum(p.requires_grad for n, p in layer.named_parameters() if "0.a." in n) == E // ep_size


@pytest.mark.parametrize("ep_size", [1, 2])
def test_c28_tags_of_added_parameters(two_ranks, ep_size):
    two_ranks(_lora_tags_worker, ep_size)


# --- conversion in place


class Net(nn.Module):
    def __init__(self, kinds=(StockMoE, StockMoE), ep_size=1):
        super().__init__()
        options = dict(k=2, top2_2nd_expert_sampling=False, drop_tokens=False, min_capacity=0)
        self.layers = nn.ModuleList(kind(H, mlp(), E, ep_size, **options) for kind in kinds)
        self.head = nn.Linear(H, H)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def kinds_of(net):
    return [type(layer.deepspeed_moe) for layer in net.layers]


def identities(net):
    return [(name, id(p)) for name, p in net.named_parameters()], [(n, id(m)) for n, m in net.named_modules()]


@pytest.mark.parametrize("kinds", [(StockMoE, StockMoE), (MoE, StockMoE), (MoE, MoE)], ids=str)
def test_conversion_is_in_place_and_reversible(kinds):
    net = Net(kinds)
    before, outer = identities(net), [type(layer) for layer in net.layers]
    for backend in ("sequential", "reference", "sequential"):
        assert configure(net, {"tile_overlap": {"enabled": True, "backend": backend}}) == 2
        assert kinds_of(net) == [TileMOELayer] * 2
        assert [layer.deepspeed_moe.tile_overlap.config.backend for layer in net.layers] == [backend] * 2
    assert [layer.deepspeed_moe.tile_overlap.name for layer in net.layers] == ["layers.0", "layers.1"]
    for _ in range(2):
        assert configure(net, {"tile_overlap": {"enabled": False}}) == 0
        assert kinds_of(net) == [MOELayer] * 2
        assert not any("tile_overlap" in vars(layer.deepspeed_moe) for layer in net.layers)
    assert identities(net) == before and [type(layer) for layer in net.layers] == outer


def test_without_the_block_only_our_class_runs_here():
    net = Net((StockMoE, MoE))
    assert configure(net, {"train_batch_size": 1}) == 1
    assert kinds_of(net) == [MOELayer, TileMOELayer]


def test_released_layer_is_bitwise_deepspeeds():
    layer = fill(stock())
    x, grad = tokens(1, 33), tokens(2, 33)
    converted = ours(layer)
    expected = backward_of(layer, x, grad)
    backward_of(converted, x, grad)
    configure(converted, {"tile_overlap": {"enabled": False}})
    assert_close(backward_of(converted, x, grad), expected, 0.0)


class OtherExperts(Experts):
    pass


class OtherMOELayer(MOELayer):
    pass


def test_refusal_lists_every_layer_and_changes_none():
    net = Net((StockMoE, StockMoE, StockMoE, MoE))
    net.layers[1].deepspeed_moe.__class__ = OtherMOELayer
    net.layers[2].deepspeed_moe.experts.__class__ = OtherExperts
    net.layers[3].deepspeed_moe.gate = nn.Linear(H, E)
    before = kinds_of(net)
    with pytest.raises(ValueError) as error:
        configure(net, {"tile_overlap": {"enabled": True}})
    message = str(error.value)
    assert "'layers.1': deepspeed_moe: got OtherMOELayer, expected MOELayer" in message
    assert "'layers.2': deepspeed_moe.experts: got OtherExperts, expected Experts" in message
    assert "'layers.3': deepspeed_moe.gate: got Linear, expected a TopKGate" in message
    assert "'layers.0'" not in message and kinds_of(net) == before


# --- initialize


def ds_config(enabled=None, **options):
    block = {} if enabled is None else {"tile_overlap": {"enabled": enabled, **options}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **block,
    }


def _given_as(way, config, folder):
    path = str(Path(folder) / f"config{torch.distributed.get_rank()}.json")
    Path(path).write_text(json.dumps(config))
    return {
        "dict": lambda: {"config": config},
        "path": lambda: {"config": path},
        "config_params": lambda: {"config_params": config},
        "args": lambda: {"args": SimpleNamespace(deepspeed_config=path)},
    }[way]()


def _initialize_worker(way, through, enabled, kinds, folder):
    net = Net([{"stock": StockMoE, "ours": MoE}[kind] for kind in kinds], ep_size=2)
    before = [(name, id(p)) for name, p in net.named_parameters()]
    initialize = {"deepspeed": deepspeed.initialize, "package": ds_tileoverlap.initialize}[through]
    given = _given_as(way, ds_config(enabled), folder)
    engine = initialize(model=net, model_parameters=list(net.parameters()), **given)[0]
    assert engine.module is net and [(name, id(p)) for name, p in net.named_parameters()] == before
    for layer in net.layers:
        assert_tagged(layer)
    first = engine(x := tokens(torch.distributed.get_rank(), 9))
    engine.backward(first.square().mean())
    engine.step()
    assert not torch.equal(engine(x), first)
    return [kind.__name__ for kind in kinds_of(net)]


@pytest.mark.parametrize("through", ["deepspeed", "package"])
@pytest.mark.parametrize("way", ["dict", "path", "config_params", "args"])
def test_initialize_reads_the_block(two_ranks, tmp_path, way, through):
    found = two_ranks(_initialize_worker, way, through, True, ("stock", "stock"), str(tmp_path))
    assert found == [["TileMOELayer"] * 2] * 2


@pytest.mark.parametrize(
    "enabled,kinds,expected",
    [
        (False, ("stock", "stock"), ["MOELayer", "MOELayer"]),
        (False, ("ours", "stock"), ["MOELayer", "MOELayer"]),
        (None, ("ours", "stock"), ["TileMOELayer", "MOELayer"]),
        (True, ("ours", "stock"), ["TileMOELayer", "TileMOELayer"]),
    ],
    ids=str,
)
def test_initialize_switch(two_ranks, tmp_path, enabled, kinds, expected):
    assert two_ranks(_initialize_worker, "dict", "deepspeed", enabled, kinds, str(tmp_path)) == [expected] * 2


def _optimizer_worker(when, zero):
    """Weights after three steps of SGD, with the package and without."""
    found = []
    for enabled in (False, True):
        net = Net(ep_size=2)
        for i, layer in enumerate(net.layers):
            fill(layer, i, ep_rank=torch.distributed.get_rank())
        fill(net.head)
        start = [p.detach().clone() for p in net.parameters()]
        groups = split_params_into_different_moe_groups_for_optimizer({"params": [*net.parameters()], "name": "all"})
        optimizer = torch.optim.SGD(groups, 0.1)
        given = {"before": optimizer, "after": lambda parameters: torch.optim.SGD(parameters, 0.1)}[when]
        config = {**ds_config(enabled), "zero_optimization": {"stage": zero}}
        parameters = None if when == "before" else groups
        engine = ds_tileoverlap.initialize(model=net, optimizer=given, model_parameters=parameters, config=config)[0]
        for step in range(3):
            engine.backward(engine(tokens(step, 9)).square().sum())
            engine.step()
        assert not any(torch.equal(p, old) for p, old in zip(net.parameters(), start))
        found.append({name: p.detach() for name, p in net.named_parameters()})
    assert_close(found[1], found[0])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_initialize_with_optimizer(two_ranks, when, zero):
    two_ranks(_optimizer_worker, when, zero)


def _twice_worker():
    net = Net(ep_size=2)
    config = ds_config(True)
    configure(net, config)
    configure(net, config)
    engine = ds_tileoverlap.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    expected = engine(tokens(0, 9))
    assert configure(net, config) == 2
    assert torch.equal(engine(tokens(0, 9)), expected)
    assert kinds_of(net) == [TileMOELayer] * 2


def test_converting_twice(two_ranks):
    two_ranks(_twice_worker)


def _refused_worker(config):
    net = Net(ep_size=2)
    net.layers[0].deepspeed_moe.experts.__class__ = OtherExperts
    with pytest.raises(ValueError) as error:
        deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    return str(error.value)


def test_initialize_refuses(two_ranks):
    assert "'layers.0'" in two_ranks(_refused_worker, ds_config(True))[0]
    assert "tile_overlap.backend: got 'all'" in two_ranks(_refused_worker, ds_config(True, backend="all"))[1]


def _said_worker(kinds, enabled):
    net = Net([{"stock": StockMoE, "ours": MoE}[kind] for kind in kinds], ep_size=2)
    with redirect_stdout(StringIO()) as said:
        deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=ds_config(enabled))
    return [line for line in said.getvalue().splitlines() if line.startswith("tile_overlap: ")]


def test_a_model_without_moe_layers_is_said(two_ranks):
    first, second = two_ranks(_said_worker, (), True)
    assert len(first) == 1 and 'no MoE layer to convert (a Hugging Face model needs "expert_parallel"' in first[0]
    assert second == [] and two_ranks(_said_worker, (), None) == two_ranks(_said_worker, (), False) == [[], []]
    first, _ = two_ranks(_said_worker, ("stock",), True)
    assert len(first) == 1 and "1 MoE layers on backend" in first[0]


@pytest.mark.parametrize("rank,lines", [(None, 1), ("0", 1), ("1", 0)])
def test_before_the_process_group_the_launcher_says_which_rank_this_is(monkeypatch, capsys, rank, lines):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    configure(Net(), ds_config(True))
    assert capsys.readouterr().out.count("tile_overlap: 2 MoE layers on backend") == lines


def test_import_installs_initialize():
    assert deepspeed.initialize is ds_tileoverlap.initialize
    assert inspect.signature(deepspeed.initialize) == inspect.signature(deepspeed.initialize.__wrapped__)


def test_import_reaches_modules_that_have_initialize_by_name(monkeypatch):
    theirs = deepspeed.initialize.__wrapped__
    train = ModuleType("train")
    train.start, train.other = theirs, print
    monkeypatch.setitem(sys.modules, "train", train)
    ds_tileoverlap.install()
    assert train.start is ds_tileoverlap.initialize and train.other is print
    assert ds_tileoverlap.initialize.__wrapped__ is theirs, "what ours itself calls"
    assert inspect.getclosurevars(ds_tileoverlap.initialize).globals["_deepspeed_initialize"] is theirs


# --- the launcher

SCRIPT = """
import argparse, sys
import deepspeed, torch
from deepspeed.moe.layer import MoE

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--width", type=int, default=1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
expert = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
layer = MoE(16, expert, 4, ep_size=2, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
engine = deepspeed.initialize(args=args, model=layer, model_parameters=list(layer.parameters()))[0]
x = torch.randn(9, 16)
for step in range(2):
    loss = (engine(x)[0] - x).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank={args.local_rank} width={args.width} main={__name__} script={sys.argv[0]} "
      f"inner={type(layer.deepspeed_moe).__name__} loss={loss.item():.8f}", flush=True)
# gloo's threads, if any live when Python ends, may abort the process.
deepspeed.comm.destroy_process_group()
"""


def run_module(arguments, folder, launched=True):
    """Exit code and output of ``ds_tileoverlap.run`` with these arguments, on two CPU ranks or alone."""
    command = [*launcher(), "--module"] if launched else [sys.executable, "-m"]
    command += ["ds_tileoverlap.run", *arguments]
    return run_program(command, LIMIT_S, cwd=folder, path=(ROOT, folder), OMP_NUM_THREADS="1")


def ranks_said(output):
    lines = re.findall(r"rank=(\d) width=(\d+) main=(\S+) script=(\S+) inner=(\w+) loss=(\d+\.\d{8})", output)
    return {int(rank): rest for rank, *rest in lines}


def test_launcher(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    said = {}
    for enabled, script in ((True, ["train.py"]), (False, ["-m", "train"])):
        (tmp_path / "config.json").write_text(json.dumps(ds_config(enabled)))
        arguments = [*script, "--deepspeed_config", "config.json", "--width", "7"]
        code, output = run_module(arguments, tmp_path)
        said[enabled] = ranks_said(output)
        assert code == 0 and set(said[enabled]) == {0, 1}, output
        inner = "TileMOELayer" if enabled else "MOELayer"
        for width, main, script_path, kind, _ in said[enabled].values():
            assert (width, main, Path(script_path).name, kind) == ("7", "__main__", "train.py", inner)
    for rank in (0, 1):
        assert abs(float(said[True][rank][-1]) - float(said[False][rank][-1])) < 1e-5


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["nowhere.py", "--lr", "1"], "script: got 'nowhere.py', expected a file"),
        (["--local_rank=0"], "no script given"),
        (["--local_rank=0", "-m"], "no script given"),
    ],
    ids=str,
)
def test_run_without_a_script(arguments, message):
    with pytest.raises(SystemExit) as exit:
        run.main(arguments)
    assert message in str(exit.value) and "usage: deepspeed --module ds_tileoverlap.run" in str(exit.value)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--local_rank=0", "--help"]], ids=str)
def test_run_says_how_it_is_used(capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        run.main(arguments)
    assert exit.value.code == 0 and capsys.readouterr().out == f"{run.USAGE}\n"


def test_run_hands_arguments_on(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "neighbour.py").write_text("NAME = 'found'")
    script = "import sys, neighbour\nprint(sys.argv, __name__, neighbour.NAME)\nsys.exit(7)"
    (tmp_path / "folder" / "show.py").write_text(script)
    code, output = run_module(["--local_rank=3", "folder/show.py", "--x", "-m", "y"], tmp_path, launched=False)
    assert code == 7 and "['folder/show.py', '--local_rank=3', '--x', '-m', 'y'] __main__ found" in output, output
