"""The ``overlap`` backend: tokens travel under the gate and up projections, outputs under the down projection.

    forward    { dispatch(x) => expert_gemm: hidden } -> { expert_gemm: output => return } -> combine: sum
    backward   as ``sequential``

Each pair in braces is one kernel: two spare warps of every CTA of the GEMM, the couriers, carry rows while the others
multiply. Whether the backend can run is decided by the whole group: what a machine cannot do once, when the group is
first used; what a layer cannot do in every forward, with a word in the exchanged counts.
"""

from __future__ import annotations

import torch

from . import sequential
from .activation import weighted_hidden
from .config import TileOverlapConfig
from .dispatch import expand_rows
from .expert_gemm import add_expert_bias_
from .expert_weights import ExpertWeights, expert_weights
from .kernels import without_autocast
from .layout import Plan
from .local_experts import LocalExperts
from .overlap_group import NS, Group
from .schedule import TILE_N, Returns, Schedule, tile_schedule
from .stages import Stages
from .symmetric_layout import rows_to_receive
from .weight_maps import WeightMaps

# A courier finds the rows of a sum in the lanes of its warp.
MAX_TOP_K = 32


def refusal(experts: LocalExperts, dtype: torch.dtype, num_experts: int, top_k: int, op) -> str | None:
    """Why this rank cannot overlap this layer now; ``None`` where it can."""
    if experts.form is None:
        return "its experts are of a form that only runs as it is, module by module"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {dtype}, not in bfloat16 or float16"
    if (experts.form.down, "bias") in experts.form.slots:
        return "its experts' down projection has a bias"
    hidden_size, width = experts.down_shape()
    if hidden_size % 8 or width % 8:
        return f"its sizes {hidden_size} and {width} are not multiples of 8"
    if top_k > MAX_TOP_K:
        return f"a token goes to {top_k} experts, more than {MAX_TOP_K}"
    if num_experts > op.MAX_EXPERTS:
        return f"it has {num_experts} experts, more than {op.MAX_EXPERTS}"
    return None


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: LocalExperts,
    plan: Plan,
    stages: Stages,
    group: Group,
    config: TileOverlapConfig,
) -> torch.Tensor:
    """As :func:`sequential.routed_experts`, for a Plan whose ranks all can overlap."""
    anchor = x.new_empty(0, requires_grad=torch.is_grad_enabled())
    dtype, parameters = sequential.compute_dtype(x), experts.parameters()
    layout = experts.weight_layout(parameters, dtype)
    run = Run(group, config, experts.maps)
    return sequential.apply_without_look(
        _OverlappedMLP, x, weights, anchor, layout, plan, dtype, stages, run, *parameters
    )


class Run:
    """What the kernels of one forward need beside its tensors."""

    def __init__(self, group: Group, config: TileOverlapConfig, maps: WeightMaps):
        self.group, self.maps = group, maps
        self.comm_sms = 0 if config.comm_sms == "auto" else config.comm_sms


class _OverlappedMLP(sequential.RoutedMLP):
    """:class:`sequential.RoutedMLP` with another forward. It keeps the rows that arrived, not what they expand to."""

    @staticmethod
    @without_autocast
    def forward(ctx, x, weights, anchor, layout, plan, dtype, stages, run, *parameters):
        tokens = x.detach().to(dtype).contiguous()
        stacks = expert_weights(layout, parameters, dtype)
        hidden, pre_activations, kept = hidden_while_sent(tokens, stacks, plan, run, stages, ctx.needs_input_grad)
        with stages("layout"):
            width = x.shape[1]
            tiles = tile_schedule(run.group, plan, width, width * tokens.element_size(), plan.returns)
            run.group.pool.returns.reserve(*(n * width * tokens.element_size() for n in rows_to_receive(plan)))
        maps = run.maps.of(run.group.op, "down", stacks.down, dtype, transposed=False)
        output = return_while_computed(run.group, plan, tiles, plan.slots, hidden, maps, width, run.comm_sms, stages)
        sequential.RoutedMLP.keep(ctx, x, weights, kept, plan, pre_activations, layout, stages, parameters, expand_rows)
        return output


def hidden_while_sent(
    tokens: torch.Tensor, weights: ExpertWeights, plan: Plan, run: Run, stages: Stages, needs: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Tokens to their experts, and what these make of them up to the activation.

    Args:
        tokens: [T, H] of this rank, contiguous.
        needs: which inputs of the autograd function need gradients.

    Returns:
        Hidden rows [R, I] scaled by their router weights, the pre-activations, and the rows from other ranks [.., H] as
        they arrived (none where nothing will be differentiated).
    """
    group, form = run.group, weights.layout.form
    channel = group.pool.tokens
    row_bytes = tokens.shape[1] * tokens.element_size()
    remote = plan.remote_sends
    channel.reserve(int(remote.sum(0).max()) * row_bytes, 2 * int(remote.sum(0).max()) * row_bytes)
    arriving = int(remote[:, plan.peers.rank].sum())
    kept = tokens.new_empty(arriving if any(needs) else 0, tokens.shape[1])
    pre_activations = []
    with stages("expert_gemm"):
        begin(group, channel, plan, group.op.TOKENS_OUT, row_bytes)
        for i, stack in enumerate(weights.inputs):
            width = stack[0][2].shape[1]
            tiles = tile_schedule(group, plan, width, row_bytes, ARRIVALS, local_first=True)
            maps = run.maps.of(group.op, f"input {i}", stack, tokens.dtype, transposed=False)
            # The first map's kernel sends this rank's tokens; the second finds everything in place.
            courier = token_courier(group, plan, tiles, tokens, row_bytes) if i == 0 else group.op.Courier()
            pre_activations.append(project_gathered(group, plan, tiles, tokens, maps, width, courier))
        group.op.keep_rows(
            received=channel.received,
            generation_bytes=channel.capacity_bytes,
            epoch=channel.epoch.data_ptr(),
            kept=kept.data_ptr(),
            num_bytes=kept.numel() * kept.element_size(),
            peer_consumed=channel.peer_consumed.data_ptr(),
            finished=channel.finished.data_ptr(),
            num_peers=plan.peers.size,
            num_sms=group.num_sms,
            stream=torch.cuda.current_stream(tokens.device).cuda_stream,
        )
        gate, up = weights.split(pre_activations, 1)
        for name, part in ((form.gate, gate), (form.up, up)):
            if name in weights.biases:
                add_expert_bias_(part, weights.biases[name], plan)
        return weighted_hidden(gate, up, plan.row_weights, form.act), pre_activations, kept


# How tokens go out: whole rows, packed, in one panel.
ARRIVALS = Returns(sums=True, aligns_owners=False, bands_per_segment=1, num_panels=1)


def begin(group: Group, channel, plan: Plan, what: int, row_bytes: int) -> None:
    """Starts a use of a channel: the next epoch, and how much must come from each peer."""
    group.op.begin_return(
        counts=plan.device_counts.data_ptr(),
        counts_stride=plan.device_counts.shape[1],
        num_ranks=plan.peers.size,
        rank=plan.peers.rank,
        num_experts=plan.num_experts,
        what=what,
        row_bytes=row_bytes,
        epoch=channel.epoch.data_ptr(),
        targets=channel.targets.data_ptr(),
        stream=torch.cuda.current_stream(plan.device_counts.device).cuda_stream,
    )


def courier_of(group: Group, channel, plan: Plan, tiles: Schedule, rows: torch.Tensor, row_bytes: int, **errand):
    """A courier's instructions: what is common to all errands, and ``errand``."""
    pool = group.pool
    return group.op.Courier(
        rows=rows.data_ptr(),
        row_bytes=row_bytes,
        num_peers=plan.peers.size,
        rank=plan.peers.rank,
        segments=tiles.segments.data_ptr(),
        num_segments=tiles.num_segments.data_ptr(),
        panel_targets=tiles.panel_targets.data_ptr(),
        peer_buffers=channel.peer_buffers.data_ptr(),
        peer_arrived=channel.peer_arrived.data_ptr(),
        peer_consumed=channel.consumed.data_ptr(),
        generation_bytes=channel.capacity_bytes,
        epoch=channel.epoch.data_ptr(),
        claimed=channel.claimed.data_ptr(),
        failure=pool.failure.data_ptr(),
        limit_ns=int(plan.peers.timeout_s * NS),
        **errand,
    )


def token_courier(group: Group, plan: Plan, tiles: Schedule, tokens: torch.Tensor, row_bytes: int):
    """Tokens [T, H] to every rank that holds any of their experts, at once: nothing has to be computed before."""
    return courier_of(
        group,
        group.pool.tokens,
        plan,
        tiles,
        tokens,
        row_bytes,
        errand=group.op.RETURN_SUMS,
        signals=0,
        signals_per_band=0,
        index=plan.sent_tokens.data_ptr(),
        num_choices=1,
        sum_runs=tiles.send_runs.data_ptr(),
        panel_done=0,
        num_panels=1,
        panel_bytes=row_bytes,
    )


def output_courier(group: Group, plan: Plan, tiles: Schedule, outputs: torch.Tensor, row_bytes: int):
    """Expert outputs [R, H] to the owners of their tokens, as soon as the tiles that they lie in are ready."""
    pool, returns = group.pool, plan.returns
    element = outputs.element_size()
    return courier_of(
        group,
        pool.returns,
        plan,
        tiles,
        outputs,
        row_bytes,
        errand=group.op.RETURN_SUMS if returns.sums else group.op.RETURN_ROWS,
        signals=pool.signals.data_ptr(),
        signals_per_band=2 * -(-outputs.shape[1] // TILE_N),
        index=plan.choice_rows.data_ptr(),
        num_choices=plan.top_k,
        sum_runs=tiles.sum_runs.data_ptr(),
        panel_done=pool.panel_done.data_ptr(),
        num_panels=returns.num_panels,
        panel_bytes=returns.panel_tiles(outputs.shape[1]) * TILE_N * element,
    )


def project_gathered(
    group: Group, plan: Plan, tiles: Schedule, tokens: torch.Tensor, maps: torch.Tensor, width: int, courier
) -> torch.Tensor:
    """Expert rows, read where they are, times their experts' weights: tokens [T, K] and what arrives -> [R, width]."""
    channel, peers = group.pool.tokens, plan.peers
    own_first = sum(plan.recv_splits[: peers.rank])
    own_sent = sum(plan.send_splits[: peers.rank])
    gather = group.op.Gather(
        sources=plan.row_sources.data_ptr(),
        own_first=own_first,
        own_end=own_first + plan.recv_splits[peers.rank],
        own_tokens=plan.sent_tokens.data_ptr() + 4 * own_sent,
        tokens=tokens.data_ptr(),
        received=channel.received,
        generation_bytes=channel.capacity_bytes,
        arrived=channel.arrived.data_ptr(),
        targets=channel.targets.data_ptr(),
        epoch=channel.epoch.data_ptr(),
        num_peers=peers.size,
        failure=group.pool.failure.data_ptr(),
        limit_ns=int(peers.timeout_s * NS),
    )
    rows = tokens.new_empty(plan.row_sources.numel(), width)
    multiply(group, tiles, rows, maps, tokens.shape[1], courier, gather=gather)
    return rows


def multiply(
    group: Group,
    tiles: Schedule,
    result: torch.Tensor,
    maps: torch.Tensor,
    inner: int,
    courier,
    operand: torch.Tensor | None = None,
    gather=None,
    comm_sms: int = 0,
    signals: int = 0,
    panel_done: int = 0,
    panel_tiles: int = 1,
    transposed: bool = False,
) -> None:
    """The expert GEMM: result [R, N] from ``operand`` [R, K] or gathered rows, by the items of ``tiles``."""
    group.op.expert_gemm(
        a=operand.data_ptr() if operand is not None else 0,
        b_maps=maps.data_ptr(),
        c=result.data_ptr(),
        items=tiles.items.data_ptr(),
        num_items=tiles.num_items.data_ptr(),
        claimed=group.pool.claimed_items.data_ptr(),
        signals=signals,
        epoch=group.pool.returns.epoch.data_ptr(),
        panel_done=panel_done,
        panel_tiles=panel_tiles,
        num_rows=result.shape[0],
        n=result.shape[1],
        k=inner,
        is_half=result.dtype == torch.float16,
        b_is_transposed=transposed,
        num_sms=group.num_sms - comm_sms,
        courier=courier,
        gather=gather if gather is not None else group.op.Gather(),
        stream=torch.cuda.current_stream(result.device).cuda_stream,
    )


def return_while_computed(
    group: Group,
    plan: Plan,
    tiles: Schedule,
    slots: torch.Tensor,
    rows: torch.Tensor,
    maps: torch.Tensor,
    width: int,
    comm_sms: int,
    stages: Stages,
) -> torch.Tensor:
    """Rows [R, K] times their experts' weights, summed at the owners of their tokens.

    The couriers are warps of the GEMM, or run beside it on ``comm_sms`` SMs; the sum follows.

    Args:
        slots: [T, k] int32, where each choice's row is summed from.

    Returns:
        [T, width].
    """
    op, pool, peers, returns = group.op, group.pool, plan.peers, plan.returns
    channel, is_half = pool.returns, rows.dtype == torch.float16
    row_bytes = width * rows.element_size()
    main = torch.cuda.current_stream(rows.device)
    outputs = rows.new_empty(rows.shape[0], width)
    sums = rows.new_empty(slots.shape[0], width)
    pool.reserve_signals(tiles.num_bands * -(-width // TILE_N) * 2)
    courier = output_courier(group, plan, tiles, outputs, row_bytes)
    with stages("expert_gemm"):
        begin(group, channel, plan, op.SUMS_HOME if returns.sums else op.ROWS_HOME, row_bytes)
        if comm_sms:
            pool.forked.record(main)
        # The GEMM first: it waits for nobody, so whatever happens to the couriers' start, nothing is held up.
        multiply(
            group,
            tiles,
            outputs,
            maps,
            rows.shape[1],
            op.Courier() if comm_sms else courier,
            operand=rows,
            comm_sms=comm_sms,
            signals=0 if returns.sums else pool.signals.data_ptr(),
            panel_done=pool.panel_done.data_ptr() if returns.sums else 0,
            panel_tiles=returns.panel_tiles(width),
        )
    with stages("combine"):
        if comm_sms:
            pool.stream.wait_event(pool.forked)
            op.run_couriers(courier=courier, is_half=is_half, num_sms=comm_sms, stream=pool.stream.cuda_stream)
            pool.joined.record(pool.stream)
            main.wait_event(pool.joined)
        op.sum_slots(
            received=channel.received,
            local=outputs.data_ptr(),
            slots=slots.data_ptr(),
            sums=sums.data_ptr(),
            arrived=channel.arrived.data_ptr(),
            targets=channel.targets.data_ptr(),
            epoch=channel.epoch.data_ptr(),
            peer_consumed=channel.peer_consumed.data_ptr(),
            finished=channel.finished.data_ptr(),
            failure=pool.failure.data_ptr(),
            generation_bytes=channel.capacity_bytes,
            limit_ns=int(peers.timeout_s * NS),
            num_tokens=sums.shape[0],
            num_choices=slots.shape[1],
            width=width,
            num_peers=peers.size,
            is_half=is_half,
            num_sms=group.num_sms,
            stream=main.cuda_stream,
        )
    return sums
