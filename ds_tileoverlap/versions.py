"""This package's version, and those it is tested with: one table for the installer, the import check and the README."""

import contextlib
import re
import sys
from importlib import metadata
from types import ModuleType

VERSION = "0.1.0"

# name -> (first tested version, first version known or suspected not to work; None where no limit is known)
TESTED = {
    "python": ("3.10", None),
    "torch": ("2.11", None),
    "triton": ("3.6", None),
    "deepspeed": ("0.19.8", "0.20"),
    # Only where a Hugging Face model is converted; DeepSpeed's AutoEP breaks with later ones.
    "transformers": ("5.12", "5.23"),
    # Only where Hugging Face models are fine-tuned: adapters, transformers' Trainer.
    "peft": ("0.21", None),
    "accelerate": ("1.15", None),
}


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version string, without local or pre-release parts: ``"2.11.0+cu130"`` -> (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def requirement(name: str) -> str:
    """The requirement of one package as the installer writes it: ``deepspeed>=0.19.8,<0.20``."""
    lowest, below = TESTED[name]
    return f"{name}>={lowest}" + (f",<{below}" if below else "")


def untested(found: dict[str, str]) -> list[str]:
    """One line for each entry of ``found`` (name -> version) that lies outside the tested range."""
    lines = []
    for name, version in found.items():
        lowest, below = TESTED[name]
        too_old = release(version) < release(lowest)
        too_new = below is not None and release(version) >= release(below)
        if too_old or too_new:
            lines.append(f"{name}: got {version}, expected {requirement(name).removeprefix(name)}")
    return lines


def check_transformers() -> None:
    """As :func:`check`, for jobs whose Hugging Face model is converted.

    Raises:
        ImportError: as of :func:`check`.
    """
    _refuse({"transformers": metadata.version("transformers")})


def check() -> None:
    """Compares the installed versions with :data:`TESTED`.

    Raises:
        ImportError: names every package outside its tested range, the version found and what is expected.
    """
    import torch
    import triton

    deepspeed = _deepspeed()
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "deepspeed": deepspeed.__version__,
    }
    _refuse(found)


def _deepspeed() -> ModuleType:
    """DeepSpeed; what it says while it is imported goes to stderr, as stdout may be a command's (``--json``)."""
    if "deepspeed" in sys.modules:
        return sys.modules["deepspeed"]
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
    for handler in deepspeed.utils.logger.handlers:
        handler.setStream(sys.stdout)
    return deepspeed


def _refuse(found: dict[str, str]) -> None:
    if lines := untested(found):
        raise ImportError("ds_tileoverlap cannot run with the installed versions:\n  " + "\n  ".join(lines))
