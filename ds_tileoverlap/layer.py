"""The MoE layer: DeepSpeed's class, parameters and process groups, with this package's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from deepspeed.moe import layer as deepspeed_layer
from deepspeed.moe.experts import Experts
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from . import overlap, overlap_group, reference, sequential, symmetric_layout
from .ahead import Ahead
from .config import TileOverlapConfig
from .exchange import Peers, peers_of
from .expert_form import has_hooks_of_others
from .layout import Plan, layout
from .local_experts import LocalExperts
from .log import say
from .route import Routes, Routing, asks_gate, route
from .stages import Recorder, Stages

if TYPE_CHECKING:
    from .planning.choices import Choices


class ResidualMoE(deepspeed_layer.MoE):
    """``MoE`` whose dense part, if it has one, runs while the counts of the routed part are on their way."""

    # As of TileMOELayer; what is computed ahead is none of a compiler's business either.
    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routed = self.deepspeed_moe
        # Experts that run as they are may draw random numbers, which upstream's dense part draws after them.
        if not self.use_residual or type(routed) is not TileMOELayer or not routed.draws_nothing():
            return super().forward(hidden_states, used_token)
        with Ahead(self, ("mlp", "coefficient"), hidden_states) as dense, routed.tile_overlap.meanwhile(dense.compute):
            return super().forward(hidden_states, used_token)


class MoE(ResidualMoE):
    """``deepspeed.moe.layer.MoE`` whose routed part runs on this package.

    Constructor, parameters, state-dict keys, process groups and ``forward(hidden_states, used_token=None) ->
    (output, l_aux, exp_counts)`` are those of DeepSpeed; see its docstring for the arguments. Differences: with
    ``drop_tokens=False`` nothing is padded to a capacity, ranks may bring different numbers of tokens, and ``k`` is any
    number from 1 to ``num_experts``. ``use_tutel`` is accepted and has no effect.

    Raises:
        ValueError: lists every argument that cannot be supported, its value and what is allowed.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        _check_arguments(hidden_size, num_experts, ep_size, k)
        super().__init__(
            hidden_size,
            expert,
            num_experts,
            ep_size,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            use_residual,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            use_tutel,
            enable_expert_tensor_parallelism,
            top2_2nd_expert_sampling,
        )
        adopt(self, TileOverlapConfig(enabled=True), name=type(self).__name__)


class TileMOELayer(MOELayer):
    """``MOELayer`` with the staged forward; an existing instance becomes one through :func:`adopt`."""

    tile_overlap: LayerRuntime

    # To torch.compile a layer is one graph break: its exchanges and the host's decisions cannot be traced.
    @torch.compiler.disable
    def forward(self, *inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Routes, computes and combines: hidden states [..., H] (and the ``used_token`` mask) -> [..., H]."""
        hidden_states, used_token = (*inputs, None)[:2]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        run = self.tile_overlap
        run.check_container(self.experts)
        experts = run.experts(self.experts.deepspeed_experts)
        peers = run.peers(self.ep_group, x.device, self.ep_size)
        _check_dtype(x, experts, run.name)

        stages = Stages(self)
        with stages("moe"):
            with stages("route", times_itself=asks_gate(self.gate)):
                routes = route(x, self.gate, used_token)
            self.l_aux, self.exp_counts = routes.l_aux, routes.exp_counts
            x, routes, num_tokens = _own_share(x, routes)
            output = run.routed_experts(x, routes, experts, peers, self.ep_size * self.num_local_experts, stages)
            output = _all_shares(output, num_tokens)
        return output.reshape(hidden_states.shape)

    def draws_nothing(self) -> bool:
        """Whether the experts are of a form that draws no random numbers."""
        return self.tile_overlap.experts(self.experts.deepspeed_experts).form is not None

    def _set_ep_group(self, ep_group: torch.distributed.ProcessGroup) -> None:
        super()._set_ep_group(ep_group)
        self._tag_parameters()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._tag_parameters()

    def _tag_parameters(self) -> None:
        """Marks every expert parameter as upstream does; copies and parameters added since have no marks."""
        for parameter in self.experts.parameters():
            parameter.allreduce = False
            parameter.group_name = self.ep_group_name


class LayerRuntime:
    """What a converted layer holds besides its modules.

    Attributes:
        config: the options of the ``tile_overlap`` block.
        name: the layer's name in the model.
        backend: the one that ran the last forward; before the first, what the config says.
        recorder: who is told of the layer's stages, in a traced step.
        routing: what the last forward's router did, as far as the host knows it.
    """

    # What a module of experts is looked at as.
    local_experts = LocalExperts

    def __init__(self, config: TileOverlapConfig, name: str):
        self.config = config
        self.name = name
        self.backend: str = config.backend
        self.recorder: Recorder | None = None
        self.routing: Routing | None = None
        self._experts: LocalExperts | None = None
        self._peers: Peers | None = None
        self._said: set[str] = set()
        self._choices: Choices | None = None
        self._meanwhile: Callable[[], None] | None = None

    @contextmanager
    def meanwhile(self, work: Callable[[], None]) -> Iterator[None]:
        """Within the block, forwards queue this work for the device while their counts are on their way."""
        self._meanwhile = work
        try:
            yield
        finally:
            self._meanwhile = None

    def check_container(self, container: Experts) -> None:
        """Says that nothing is ever run with the module around all experts, where somebody expects it to be.

        Raises:
            RuntimeError: it has a forward of its own. Hooks only warn: many watch every module, and training can go on.
        """
        name = f"{self.name}.deepspeed_moe.experts"
        instead = "put it on the experts inside, .deepspeed_experts[i], or on the MoE layer"
        if "forward" in vars(container) or type(container).forward is not Experts.forward:
            raise RuntimeError(f"tile_overlap never calls '{name}', which has a forward of its own: {instead}")
        if name not in self._said and has_hooks_of_others(container):
            self._said.add(name)
            say(f"'{name}' has a hook that does not run, as the module is never called: {instead}", every_rank=True)

    def experts(self, modules: nn.Module) -> LocalExperts:
        """The local experts, looked at again where any of them changed."""
        if self._experts is None or not self._experts.are_current(modules):
            self._experts = self.local_experts(modules)
        return self._experts

    def peers(self, group: torch.distributed.ProcessGroup | None, device: torch.device, ep_size: int) -> Peers:
        if self._peers is None or self._peers.group is not group:
            if group is None and ep_size > 1:
                raise RuntimeError(
                    f"MoE layer '{self.name}': its experts are spread over ep_size = {ep_size} ranks, which have no "
                    "process group yet: call deepspeed.initialize, or the layer's set_deepspeed_parallelism(), first"
                )
            self._peers = peers_of(group, device, self.config.timeout_s, self.name)
        return self._peers

    def routed_experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        experts: LocalExperts,
        peers: Peers,
        num_experts: int,
        stages: Stages,
    ) -> torch.Tensor:
        """The stages from layout to combine: tokens [T, H] -> [T, H], on the backend that the whole group can run."""
        meanwhile = self._meanwhile or (lambda: None)
        group, again = self.overlap_group(peers, x.device), self.config.recompute_dispatch
        runs_modules = experts.form is None
        if group is None:
            with stages("layout"):
                plan = layout(routes, num_experts, peers, meanwhile, runs_modules)
            self.routing = Routing(plan.counts, peers, routes.experts.numel())
            self.backend = "reference" if self.config.backend == "reference" else "sequential"
            if self.backend == "reference":
                return reference.routed_experts(x, routes.weights, experts, plan, stages)
            return sequential.routed_experts(x, routes.weights, experts, plan, stages, again)
        # Whether this rank can overlap now goes with the counts; what all do follows from what all of them say.
        dtype = sequential.compute_dtype(x)
        reason = overlap.refusal(experts, dtype, num_experts, routes.experts.shape[1], group.op)
        with stages("layout"):
            counting = symmetric_layout.Counting(
                routes,
                num_experts,
                peers,
                group,
                self.config,
                x.shape[1] * dtype.itemsize,
                can_overlap=reason is None,
                choices=self._auto(group, experts, num_experts, routes.experts.shape[1], peers, reason),
                runs_modules=runs_modules,
            )
        try:
            meanwhile()
            if reason is None:
                output = overlap.routed_experts(x, routes.weights, experts, counting, stages)
            else:
                output = sequential.routed_experts(x, routes.weights, experts, counting.finish(), stages, again)
        except Exception:
            counting.settle()
            raise
        self.routing = Routing(counting.plan.counts, peers, routes.experts.numel())
        self.backend = "overlap" if counting.plan.overlaps else "sequential"
        self._say_what_ran(counting.plan, reason)
        return output

    def overlap_group(self, peers: Peers, device: torch.device) -> overlap_group.Group | None:
        """The group as ranks that write into each other's memory; ``None`` where it cannot, or shall not."""
        if self.config.backend not in ("auto", "overlap"):
            return None
        group = overlap_group.group_of(peers, device, self.config.profile)
        return group if group.op is not None else None

    def _auto(
        self,
        group: overlap_group.Group,
        experts: LocalExperts,
        num_experts: int,
        top_k: int,
        peers: Peers,
        reason: str | None,
    ) -> Choices | None:
        """What the group's profile decides for these experts; ``None`` where there is none, or nothing to decide."""
        if group.profile is None or reason is not None:
            return None
        known = self._choices
        if known is None or known.experts is not experts or known.group is not group:
            from .planning.choices import Choices  # with PyYAML, for those alone who have a profile

            self._choices = Choices(group, self.config, experts, num_experts, top_k, peers)
        return self._choices

    def _say_what_ran(self, plan: Plan, reason: str | None) -> None:
        if reason and reason not in self._said and plan.first_that_cannot_overlap == plan.peers.rank:
            self._said.add(reason)
            say(f"MoE layer '{self.name}' is sequential instead of overlap, as {reason}", every_rank=True)

    def __deepcopy__(self, memo: dict) -> LayerRuntime:
        return type(self)(self.config, self.name)


def runtimes_of(model: nn.Module) -> list[LayerRuntime]:
    """What the converted layers of a model hold, in the model's order."""
    found = (getattr(module, "tile_overlap", None) for module in model.modules())
    # A module that wraps another may have that one's attributes, too.
    return [runtime for runtime in dict.fromkeys(found) if runtime is not None]


def refusal(moe: deepspeed_layer.MoE) -> str | None:
    """Why the layer cannot be converted; ``None`` where it can."""
    inner = moe.deepspeed_moe
    if type(inner) not in (MOELayer, TileMOELayer):
        return f"deepspeed_moe: got {type(inner).__qualname__}, expected {MOELayer.__qualname__}"
    if type(inner.experts) is not Experts:
        return f"deepspeed_moe.experts: got {type(inner.experts).__qualname__}, expected {Experts.__qualname__}"
    if not isinstance(inner.gate, TopKGate):
        return f"deepspeed_moe.gate: got {type(inner.gate).__qualname__}, expected a {TopKGate.__qualname__}"
    return None


def adopt(moe: deepspeed_layer.MoE, config: TileOverlapConfig, name: str) -> None:
    """Makes a MoE module of DeepSpeed run on this package, in place: same modules, parameters, names and groups.

    Raises:
        ValueError: the module is of a kind that this package does not know.
    """
    if reason := refusal(moe):
        raise ValueError(f"tile_overlap cannot run MoE layer '{name}': {reason}")
    moe.deepspeed_moe.__class__ = TileMOELayer
    if type(moe) is deepspeed_layer.MoE and moe.use_residual:
        moe.__class__ = ResidualMoE
    moe.deepspeed_moe.tile_overlap = LayerRuntime(config, name)


def release(moe: deepspeed_layer.MoE) -> None:
    """Undoes :func:`adopt`."""
    if type(moe.deepspeed_moe) is TileMOELayer:
        del moe.deepspeed_moe.tile_overlap
        moe.deepspeed_moe.__class__ = MOELayer
    if type(moe) is ResidualMoE:
        moe.__class__ = deepspeed_layer.MoE


def _check_arguments(hidden_size: int, num_experts: int, ep_size: int, k: int) -> None:
    faults = [
        f"{name}: got {value!r}, expected an integer of at least 1"
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts), ("ep_size", ep_size))
        if not isinstance(value, int) or value < 1
    ]
    if not isinstance(k, int) or not 1 <= k <= max(num_experts if isinstance(num_experts, int) else 1, 1):
        faults.append(f"k: got {k!r}, expected an integer from 1 to num_experts = {num_experts!r}")
    if faults:
        raise ValueError("MoE layer: " + "; ".join(faults))


def _check_dtype(x: torch.Tensor, experts: LocalExperts, name: str) -> None:
    """Refuses what the experts' first GEMM would refuse, before any rank waits in an exchange."""
    if experts.form is None or torch.is_autocast_enabled(x.device.type):
        return
    dtype = experts.parameters()[0].dtype
    if x.dtype != dtype:
        raise RuntimeError(
            f"MoE layer '{name}': hidden_states: got {x.dtype}, expected {dtype} as the experts' parameters are "
            "(cast the input, or use autocast)"
        )


def _own_share(x: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, Routes, int | None]:
    """This tensor-parallel rank's share of tokens that all of them hold; everything where experts are sharded too.

    Sharded experts need every token on each of their shards, which then belong to different expert-parallel groups.
    """
    size = bwc_tensor_model_parallel_world_size(groups.mpu)
    if size == 1 or groups._get_expert_model_parallel_world_size() > 1:
        return x, routes, None
    num_tokens = x.shape[0]
    pad = -num_tokens % size
    experts = F.pad(routes.experts, (0, 0, 0, pad), value=-1)
    share = Routes(
        drop_tokens(experts).contiguous(),
        drop_tokens(F.pad(routes.weights, (0, 0, 0, pad))),
        routes.l_aux,
        routes.exp_counts,
    )
    return drop_tokens(F.pad(x, (0, 0, 0, pad))), share, num_tokens


def _all_shares(output: torch.Tensor, num_tokens: int | None) -> torch.Tensor:
    """The outputs of all tokens from every tensor-parallel rank's share; undoes :func:`_own_share`."""
    return output if num_tokens is None else gather_tokens(output)[:num_tokens]
