"""What commands are told: numbers and layers, for argparse, and how they say that it is wrong."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from .config import BLOCK, ConfigError, read
from .planning.routing import Shape

# As in the tables of README.md -> field of Shape.
LETTERS = {"H": "hidden", "I": "intermediate", "E": "experts", "k": "top_k", "tokens": "tokens"}


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what was got and what is expected."""


def whole(text: str) -> int:
    """A number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"got {text!r}, expected a whole number")
    return int(text)


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def shape(text: str) -> Shape:
    """``H=2048,I=768,E=128,k=8,tokens=8192``, in any order, each once; spaces around commas do not count."""
    parts = [part.strip().partition("=")[::2] for part in text.split(",")]
    if sorted(letter for letter, _ in parts) != sorted(LETTERS) or not all(value.isdecimal() for _, value in parts):
        expected = ",".join(f"{letter}=.." for letter in LETTERS)
        raise ArgumentTypeError(f"got {text!r}, expected {expected} with whole numbers, each once")
    return Shape(**{LETTERS[letter]: int(value) for letter, value in parts})


def block_of(path: Path | None) -> dict[str, Any]:
    """The ``tile_overlap`` block of a ds_config file, for a command that takes it as enabled; says so where it is not.

    Raises:
        UsageError: the file cannot be read, or is wrong.
    """
    try:
        ds_config = read(path) if path else {}
    except ConfigError as error:
        raise UsageError(error) from error
    block = ds_config.get(BLOCK, {"enabled": True})
    if not block.get("enabled"):
        print(f"ds-tileoverlap: {path}: {BLOCK}.enabled is false; what follows is with true", file=sys.stderr)
    return block
