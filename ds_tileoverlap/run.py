"""Runs a training script unchanged, with ``deepspeed.initialize`` reading the ``tile_overlap`` block.

deepspeed --module ds_tileoverlap.run train.py --deepspeed_config c.json ...
deepspeed --module ds_tileoverlap.run -m package.train --deepspeed_config c.json ...
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: deepspeed --module ds_tileoverlap.run (SCRIPT.py | -m MODULE) [script arguments]"


def main(arguments: list[str]) -> None:
    """Runs the script named in ``arguments``; options that the launcher put before it are handed on to it.

    Raises:
        SystemExit: no script is named, or there is no such file; or help is asked for before a script.
    """
    leading = []
    while arguments and arguments[0].startswith("--"):
        leading.append(arguments.pop(0))
    if "--help" in leading or arguments[:1] == ["-h"]:
        print(USAGE)
        raise SystemExit(0)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments.pop(0)
    if not arguments:
        raise SystemExit(f"ds_tileoverlap.run: no script given\n{USAGE}")
    script = arguments.pop(0)
    if not as_module and not os.path.isfile(script):
        raise SystemExit(f"ds_tileoverlap.run: script: got {script!r}, expected a file\n{USAGE}")

    # Importing this package has already put its initialize in the place of deepspeed's.
    sys.argv = [script, *leading, *arguments]
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
