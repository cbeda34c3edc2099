"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file or a folder; what the block makes there is ``path`` in the end.

    If anything comes between, it is removed, and what was at ``path`` stays.
    """
    # Not the process's number alone: folders are shared between machines.
    part = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        # Why the block failed is what matters, not whether there is anything to remove.
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):
            part.unlink()
        raise
