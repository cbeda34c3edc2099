"""What kind of module an expert is: one that the grouped GEMMs can compute, or one that must run as it is.

An expert's forward is traced symbolically and compared with ``down(act(up(x)))`` and ``down(act(gate(x)) * up(x))``;
names do not matter, and a module that does anything else, now or through a hook, is left to run itself.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .activation import Activation


@dataclass(frozen=True)
class ExpertForm:
    """An MLP that the grouped GEMMs can compute.

    Attributes:
        act: what lies between its projections.
        gate: the gate projection's name in the expert, ``None`` where the MLP has none.
        up, down: the names of the other projections.
        biased: whether each of (gate,) up, down adds a bias.
    """

    act: Activation
    gate: str | None
    up: str
    down: str
    biased: tuple[bool, ...]

    @property
    def projections(self) -> tuple[str, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def slots(self) -> list[tuple[str, str]]:
        """The parameters of one expert in a fixed order: (projection, "weight" or "bias")."""
        pairs = zip(self.projections, self.biased)
        return [(name, kind) for name, biased in pairs for kind in (("weight", "bias") if biased else ("weight",))]


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """The module's hook dictionaries; forward and backward, before and after."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says: a hook, or a ``forward`` of its own."""
    return "forward" in vars(module) or any(hooks_of(module))


def has_hooks_of_others(module: nn.Module) -> bool:
    """Whether anybody but DeepSpeed, whose ZeRO and flops profiler hook every module, has a hook on the module."""
    return any(not hook.__module__.startswith("deepspeed.") for hooks in hooks_of(module) for hook in hooks.values())


def common_form(experts: nn.ModuleList) -> ExpertForm | None:
    """The form that all experts share, with equal shapes and dtypes; ``None`` where they do not."""
    forms = {trace_form(expert) for expert in experts}
    kinds = {tuple((p.shape, p.stride(), p.dtype, p.device) for p in expert.parameters()) for expert in experts}
    if not all(p.is_contiguous() for p in experts.parameters()):
        return None
    return forms.pop() if len(forms) == len(kinds) == 1 else None


def trace_form(expert: nn.Module) -> ExpertForm | None:
    """The form of one expert, ``None`` where its forward is not one of the two known MLPs."""
    for module in expert.modules():
        if is_watched(module) or type(module).__call__ is not nn.Module.__call__:
            return None
    parameters = list(expert.parameters())
    try:
        graph = fx.Tracer().trace(expert)
    except Exception:  # any failure to trace means a forward that is not a plain MLP
        return None
    form = _match(graph, expert)
    if form is None:
        return None
    linears = [expert.get_submodule(name) for name in form.projections]
    own = [p for linear in linears for p in linear.parameters(recurse=False)]
    # Each parameter belongs to one projection, and there is none besides: every one of them gets its gradient here.
    if len({id(p) for p in own}) != len(own) or {id(p) for p in own} != {id(p) for p in parameters}:
        return None
    return form


def _match(graph: fx.Graph, expert: nn.Module) -> ExpertForm | None:
    """Reads the graph from its output back to its input."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    if isinstance(result, (tuple, list)):
        result = result[0] if result else None
    down = _linear(result, expert)
    hidden = result.args[0] if down else None
    gate = None
    if _is_product(hidden):
        halves = [hidden.args, hidden.args[::-1]]
        matches = [(a, u) for a, u in halves if _activation(a, expert) and _linear(u, expert)]
        if len(matches) != 1:
            return None
        activated, up_node = matches[0]
        gate_node = activated.args[0]
        gate, used = _linear(gate_node, expert), {result, hidden, activated, gate_node, up_node}
    else:
        activated = hidden
        if not _activation(activated, expert):
            return None
        up_node = activated.args[0]
        used = {result, activated, up_node}
        gate_node = up_node
    act, up = _activation(activated, expert), _linear(up_node, expert)
    sources = {node.args[0] for node in (gate_node, up_node) if isinstance(node, fx.Node) and node.args}
    if not (up and (gate or gate_node is up_node) and sources == {inputs[0]} and used == set(nodes)):
        return None
    names = (up, down) if gate is None else (gate, up, down)
    biased = tuple(expert.get_submodule(name).bias is not None for name in names)
    return ExpertForm(Activation(act), gate, up, down, biased)


def _linear(node: Any, expert: nn.Module) -> str | None:
    """The name of the plain ``nn.Linear`` that a node calls."""
    if isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        if type(expert.get_submodule(node.target)) is nn.Linear:
            return node.target
    return None


def _is_product(node: Any) -> bool:
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs:
        return False
    return node.target in (operator.mul, torch.mul) or (node.op == "call_method" and node.target == "mul")


def _activation(node: Any, expert: nn.Module) -> str | None:
    """The name of the known activation that a node applies."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    if node.op == "call_module":
        module = expert.get_submodule(node.target)
        if type(module) is nn.GELU:
            return _gelu(module.approximate)
        return {nn.SiLU: "silu", nn.ReLU: "relu"}.get(type(module)) if len(node.args) == 1 else None
    if node.op == "call_function":
        if node.target is F.gelu and len(node.args) == 1:
            return _gelu(node.kwargs.get("approximate", "none"))
        if len(node.args) == 1 and set(node.kwargs) <= {"inplace"}:
            return {F.silu: "silu", F.relu: "relu", torch.relu: "relu"}.get(node.target)
    if node.op == "call_method" and node.target == "relu" and len(node.args) == 1:
        return "relu"
    return None


def _gelu(approximate: str) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
