"""Dense parts of a layer run before the layer's own code calls them, so that the device works while the host waits."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class Ahead:
    """Submodules whose output is made early: within the block, their owner's calls of them get what they returned.

    Args:
        names: of the owner's submodules; where there is none, nothing is done.
        x: what their owner will call all of them with.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...], x: torch.Tensor):
        self._owner, self._x, self._outputs = owner, x, {}
        self._modules = {name: module for name in names if (module := getattr(owner, name)) is not None}

    def compute(self) -> None:
        self._outputs = {name: module(self._x) for name, module in self._modules.items()}

    def __enter__(self) -> Ahead:
        for name in self._modules:
            # Comes before the submodules when the owner looks the name up.
            vars(self._owner)[name] = partial(self._output_of, name)
        return self

    def _output_of(self, name: str, x: torch.Tensor):
        return self._outputs.pop(name) if name in self._outputs else self._modules[name](x)

    def __exit__(self, *_: object) -> None:
        for name in self._modules:
            del vars(self._owner)[name]
