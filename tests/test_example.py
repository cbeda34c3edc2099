"""The example as a user starts it: swap of the layers in mid-training, exact resume, loss curve, error messages."""

import re
import sys

import options
import pytest
import train_moe
from launched import ROOT, launcher, run

# The first start of DeepSpeed on a machine compiles its shared-memory collectives, which takes minutes.
LIMIT_S = 400
TINY = (
    "--preset small --d-model 32 --heads 2 --layers 2 --ffn 32 --experts 4 --seq-len 32 --micro-batch 4 "
    "--eval-windows 16 --eval-every 4 --steps 9"
).split()


def train(*options):
    """Runs the example on two CPU ranks; returns its exit code and everything it printed."""
    script = [str(ROOT / "examples/train_moe.py"), "--deepspeed_config", str(ROOT / "configs/train_moe.json")]
    return run([*launcher(), *script, *TINY, *map(str, options)], LIMIT_S)


def final(output):
    line = re.search(r"final: step=(\d+) train_loss=(\S+) eval_loss=(\S+) .*backend=(\w+)", output)
    assert line, output
    return int(line[1]), float(line[2]), float(line[3]), line[4]


def test_swap_then_resume(tmp_path):
    code, output = train("--swap-demo", "--swap-step", 3, "--save-every", 6, "--save-dir", tmp_path / "run")
    assert code == 0, output
    swap = re.search(r"swap: stock eval_loss=(\S+) ours eval_loss=(\S+) .*ok\)", output)
    assert swap and abs(float(swap[1]) - float(swap[2])) <= 1e-4, output
    straight = final(output)
    assert straight[0] == 9 and straight[3] != "stock", output
    assert (tmp_path / "run/loss_curve.png").read_bytes().startswith(b"\x89PNG")

    code, output = train("--resume", tmp_path / "run/step6", "--save-dir", tmp_path / "resumed")
    assert code == 0 and "at step 6" in output, output
    assert final(output) == straight
    assert (tmp_path / "resumed/loss_curve.png").exists()

    code, output = train("--resume", tmp_path / "nothing", "--save-dir", tmp_path / "unused")
    assert code != 0 and "Traceback" not in output, output
    assert output.count("holds no checkpoint of this program") == 1, output


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_numbers_that_do_not_train(monkeypatch, value):
    given = ["--deepspeed_config", "none.json", "--lr", value, "--aux-coefficient", value]
    monkeypatch.setattr(sys, "argv", ["train_moe.py", *given])
    args = options.parse_arguments("")
    with pytest.raises(options.UsageError) as error:
        options.check(args, options.choose_settings(args), 2)
    for name, least in (("lr", "above"), ("aux-coefficient", "of at least")):
        assert f"--{name}: got {float(value)}, expected a number {least} 0" in str(error.value)


def test_a_folder_that_cannot_be_made(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    given = ["--deepspeed_config", str(ROOT / "configs/train_moe.json"), "--save-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", ["train_moe.py", *given])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(train_moe, "start_ranks", None)
    assert train_moe.run_main(train_moe.main, "train_moe") == 2
    assert f"train_moe: --save-dir: cannot make {folder} (Not a directory)" in capsys.readouterr().err
