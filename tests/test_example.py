"""The example as a user starts it: swap of the layers in mid-training, exact resume, loss curve, error messages."""

import re

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
