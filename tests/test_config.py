"""The ds_config block: what is taken, every fault in one message, and the versions table."""

import re

import pytest
from torch import nn

from ds_tileoverlap import ConfigError, TileOverlapConfig, configure, versions
from ds_tileoverlap.config import OVERLAP_OPTIONS, parse, read

DEFAULTS = dict(
    enabled=False,
    backend="auto",
    comm_sms="auto",
    combine="auto",
    bands_per_segment="auto",
    owner_alignment="auto",
    overlap_dispatch=True,
    overlap_backward=True,
    profile="auto",
    recompute_dispatch=False,
    timeout_s=None,
    log_every=0,
    trace=None,
)


def fault_of(block):
    with pytest.raises(ConfigError) as error:
        parse({"train_batch_size": 1, "tile_overlap": block})
    return str(error.value)


def test_absent_block_gives_none():
    assert parse({"train_batch_size": 1}) is None


def test_empty_block_gives_the_defaults():
    assert parse({"tile_overlap": {}}).model_dump() == DEFAULTS


@pytest.mark.parametrize(
    "block",
    [
        {"enabled": True},
        {"backend": "sequential", "timeout_s": 5.5, "recompute_dispatch": True},
        {"backend": "reference", "timeout_s": 30},
        {"backend": "overlap", "comm_sms": 0, "combine": "sums"},
        {"comm_sms": 2, "bands_per_segment": 1, "owner_alignment": "packed"},
        {"backend": "auto", "comm_sms": 64, "bands_per_segment": 64, "owner_alignment": "tile"},
        {"overlap_dispatch": False, "overlap_backward": False, "comm_sms": "auto"},
        {"log_every": 100, "trace": {"step": 1, "folder": "there"}},
        {"backend": "reference", "log_every": 1, "trace": None},
        {"profile": "none"},
        {"profile": "rates.yaml"},
    ],
    ids=str,
)
def test_valid_block(block):
    assert parse({"tile_overlap": block}).model_dump() == {**DEFAULTS, **block}


@pytest.mark.parametrize(
    "name,value,expected",
    [
        ("enabled", 1, "true or false"),
        ("enabled", "true", "true or false"),
        ("enabled", None, "true or false"),
        ("backend", "nccl", "'auto', 'overlap', 'sequential' or 'reference'"),
        ("backend", 3, "'auto', 'overlap', 'sequential' or 'reference'"),
        ("comm_sms", -2, "'auto' or an even number of SMs, 0 to 64"),
        ("comm_sms", 7, "'auto' or an even number of SMs, 0 to 64"),
        ("comm_sms", 66, "'auto' or an even number of SMs, 0 to 64"),
        ("comm_sms", True, "'auto' or an even number of SMs, 0 to 64"),
        ("combine", "row", "'auto', 'rows' or 'sums'"),
        ("bands_per_segment", 0, "'auto' or an integer, 1 to 64"),
        ("bands_per_segment", 65, "'auto' or an integer, 1 to 64"),
        ("bands_per_segment", 2.0, "'auto' or an integer, 1 to 64"),
        ("owner_alignment", "row", "'auto', 'tile' or 'packed'"),
        ("overlap_dispatch", "yes", "true or false"),
        ("overlap_backward", 0, "true or false"),
        ("profile", "", "'auto', 'none', or the path of a file"),
        ("profile", None, "'auto', 'none', or the path of a file"),
        ("timeout_s", 4.9, "a number of seconds, at least 5"),
        ("timeout_s", 0, "a number of seconds, at least 5"),
        ("timeout_s", -1.5, "a number of seconds, at least 5"),
        ("timeout_s", float("inf"), "a number of seconds, at least 5"),
        ("timeout_s", float("nan"), "a number of seconds, at least 5"),
        ("timeout_s", "30", "a number of seconds, at least 5"),
        ("timeout_s", True, "a number of seconds, at least 5"),
        ("log_every", -1, "a number of steps, or 0 for never"),
        ("log_every", 2.5, "a number of steps, or 0 for never"),
        ("trace", 5, 'an object like {"step": 10, "folder": "trace"}'),
        ("trace", {"step": 3}, 'an object like {"step": 10, "folder": "trace"}'),
        ("trace", {"step": 0, "folder": "trace"}, 'an object like {"step": 10, "folder": "trace"}'),
        ("trace", {"step": 3, "folder": ""}, 'an object like {"step": 10, "folder": "trace"}'),
        ("trace", {"step": 3, "folder": "trace", "rank": 0}, 'an object like {"step": 10, "folder": "trace"}'),
    ],
)
def test_wrong_value(name, value, expected):
    message = fault_of({name: value})
    assert f"tile_overlap.{name}: got {value!r}, expected {expected}" in message
    assert message.count("got ") == 1


def test_unknown_key():
    message = fault_of({"enabled": True, "comm_sm": 8})
    assert "tile_overlap.comm_sm: got an unknown option, 8, expected one of " + ", ".join(DEFAULTS) in message


@pytest.mark.parametrize("block", [None, True, [], "sequential"], ids=repr)
def test_block_that_is_no_object(block):
    assert f"tile_overlap: got {block!r}, expected an object" in fault_of(block)


@pytest.mark.parametrize("backend", ["sequential", "reference"])
def test_option_of_another_backend(backend):
    values = dict(
        comm_sms=8,
        combine="rows",
        bands_per_segment=2,
        owner_alignment="tile",
        overlap_dispatch=False,
        overlap_backward=True,
        profile="none",
    )
    assert set(values) == set(OVERLAP_OPTIONS)
    message = fault_of({"backend": backend, **values})
    assert "7 faults" in message
    for name, value in values.items():
        fault = f"tile_overlap.{name}: got {value!r} together with backend {backend!r}, expected backend 'auto' or"
        assert fault in message
    assert "expected backend 'auto' or 'overlap' or 'sequential'" in fault_of(
        {"backend": "reference", "recompute_dispatch": True}
    )


def test_every_fault_in_one_message():
    message = fault_of(
        {"enabled": "on", "backend": "reference", "comm_sms": 3, "overlap_dispatch": True, "timeout_s": 0, "tile": 1}
    )
    assert "5 faults" in message
    found = re.findall(r"^  tile_overlap\.(\w+): got (?:an unknown option, )?(.+), expected .+$", message, re.M)
    assert {name: got.split(" ")[0] for name, got in found} == {
        "enabled": "'on'",
        "comm_sms": "3",
        "timeout_s": "0",
        "tile": "1",
        "overlap_dispatch": "True",
    }


def test_configure_refuses_a_wrong_block():
    with pytest.raises(ConfigError, match="tile_overlap.enabled"):
        configure(nn.Linear(1, 1), {"tile_overlap": {"enabled": 2}})
    assert configure(nn.Linear(1, 1), {"tile_overlap": {"enabled": True}}) == 0


def test_a_file_is_read_as_deepspeed_does(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 1, # a comment, and a comma at the end\n "tile_overlap": {"comm_sms": 8},}')
    assert read(path) == {"train_batch_size": 1, "tile_overlap": {"comm_sms": 8}}


@pytest.mark.parametrize(
    "text,words",
    [
        ("[1, 2]", "got [1, 2], expected an object"),
        ('{"tile_overlap": {"enabled": false}, "tile_overlap": {"enabled": true}}', "Duplicate keys"),
        ('{"tile_overlap": {"combine": "rows", "combine": "sums"}}', "Duplicate keys"),
        ('{"tile_overlap": {"enabled": 3}}', "tile_overlap.enabled: got 3"),
        ("{", "line 1"),
        ("\xff", "can't decode"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, words):
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value)


def test_every_field_says_what_is_expected():
    assert all(field.description for field in TileOverlapConfig.model_fields.values())


def test_versions_release():
    assert versions.release("2.11.0+cu130") == (2, 11, 0)
    assert versions.release("0.19.9rc1") == (0, 19, 9)


def test_versions_requirement():
    assert versions.requirement("deepspeed") == "deepspeed>=0.19.8,<0.20"
    assert versions.requirement("torch") == "torch>=2.11"


@pytest.mark.parametrize(
    "found,lines",
    [
        ({"deepspeed": "0.19.8", "torch": "2.11.0+cu130", "python": "3.10.1", "triton": "3.6.0"}, []),
        ({"deepspeed": "0.19.12", "torch": "3.0"}, []),
        ({"deepspeed": "0.19.7"}, ["deepspeed: got 0.19.7, expected >=0.19.8,<0.20"]),
        ({"deepspeed": "0.20"}, ["deepspeed: got 0.20, expected >=0.19.8,<0.20"]),
        ({"deepspeed": "0.20.0"}, ["deepspeed: got 0.20.0, expected >=0.19.8,<0.20"]),
        (
            {"torch": "2.9.1", "triton": "3.5", "python": "3.11.7"},
            ["torch: got 2.9.1, expected >=2.11", "triton: got 3.5, expected >=3.6"],
        ),
    ],
)
def test_versions_untested(found, lines):
    assert versions.untested(found) == lines


def test_versions_check(monkeypatch):
    versions.check()
    monkeypatch.setitem(versions.TESTED, "torch", ("99.0", None))
    monkeypatch.setitem(versions.TESTED, "deepspeed", ("0.1", "0.2"))
    with pytest.raises(ImportError) as error:
        versions.check()
    message = str(error.value)
    assert re.search(r"torch: got \S+, expected >=99.0", message)
    assert re.search(r"deepspeed: got \S+, expected >=0.1,<0.2", message)
    assert "triton" not in message
