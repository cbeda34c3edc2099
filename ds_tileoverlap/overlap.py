"""The ``overlap`` backend: expert outputs travel home tile by tile while the down projection still runs.

    forward    dispatch(x) -> expert_gemm: hidden -> { expert_gemm: output => return } -> combine: sum
    backward   as ``sequential``

Whether it can run is decided by the whole group: what a machine cannot do once, when the group is first used; what a
layer cannot do in every forward, with a word in the exchanged counts.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from . import sequential
from .buffer import Pool, pool_of
from .config import TileOverlapConfig
from .exchange import PeerError, Peers
from .expert_weights import ExpertWeights
from .layout import Plan
from .local_experts import LocalExperts
from .log import say
from .schedule import BAND, TILE_N, Returns, Schedule, schedule
from .stages import Stages
from .weight_maps import WeightMaps

# A waiting kernel gives up this long after the group's own limit, so that the host's error comes first where it can.
NS = 1_000_000_000
SEGMENT_BYTES = 2**21
# Sums return where they are so many times fewer than rows: adding up costs memory traffic, and starts later.
SUMS_BELOW = 0.6
# A courier finds the rows of a sum in the lanes of its warp.
MAX_TOP_K = 32


@dataclass
class Group:
    """What an expert-parallel group can do.

    Attributes:
        op: the compiled operator; ``None`` where some rank cannot run it.
        reason: why not.
        pool: the symmetric memory.
    """

    op: object | None
    reason: str | None
    pool: Pool | None
    num_sms: int = 0


_GROUPS: dict[dist.ProcessGroup | None, Group] = {}


def group_of(peers: Peers, device: torch.device) -> Group:
    """What the group can do, found out at the first call, which is collective."""
    found = _GROUPS.get(peers.group)
    if found is None:
        found = _GROUPS[peers.group] = _examine(peers, device)
        if peers.rank == 0:
            members = ", ".join(map(str, peers.ranks))
            say(
                f"sequential instead of overlap, as {found.reason}" if found.reason else f"overlap on ranks {members}",
                every_rank=True,
            )
    return found


def _examine(peers: Peers, device: torch.device) -> Group:
    if peers.size == 1:
        return Group(None, "the expert-parallel group has one rank, which exchanges nothing", None)
    op, reason = None, _refusal(device)
    if reason is None:
        try:
            from .op_builder.tileoverlap import TileOverlapBuilder

            builder = TileOverlapBuilder()
            reason = builder.refusal()
            op = builder.load() if reason is None else None
            if op is not None and peers.size > op.MAX_PEERS:
                reason = f"the expert-parallel group has {peers.size} ranks, more than {op.MAX_PEERS}"
        except Exception as error:  # whatever a compiler may say: the job goes on without the operator
            reason = f"the kernels could not be built: {error}"
    ours = (reason, socket.gethostname(), _uuid(device) if device.type == "cuda" else "")
    everyone: list = [None] * peers.size
    dist.all_gather_object(everyone, ours, group=peers.group)
    reason = _common_refusal(everyone, peers)
    if reason is not None:
        return Group(None, reason, None)
    pool = pool_of(peers, device, op.MAX_PANELS)
    _load_kernels(op, pool)
    return Group(op, None, pool, torch.cuda.get_device_properties(device).multi_processor_count)


def _refusal(device: torch.device) -> str | None:
    """Why this rank's machine cannot overlap."""
    if device.type != "cuda":
        return f"the layer runs on {device.type}, not on a GPU"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not 9.0 (Hopper)"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1 keeps two kernels from running together"
    return None


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _common_refusal(everyone: list[tuple[str | None, str, str]], peers: Peers) -> str | None:
    """The group's answer, the same on every rank, from what each rank reported."""
    for place, (reason, _, _) in enumerate(everyone):
        if reason:
            return f"{reason} (rank {peers.ranks[place]})"
    hosts = {host for _, host, _ in everyone}
    if len(hosts) > 1:
        return f"the expert-parallel group spans {len(hosts)} machines ({', '.join(sorted(hosts))})"
    if len({uuid for _, _, uuid in everyone}) < peers.size:
        return "ranks of the expert-parallel group share a GPU"
    # Peer access is symmetric and this asks about all pairs, where all devices are visible to every rank.
    uuids = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    visible = [uuids[uuid] for _, _, uuid in everyone if uuid in uuids]
    pairs = [(a, b) for a in visible for b in visible if a != b and not torch.cuda.can_device_access_peer(a, b)]
    return f"GPU {pairs[0][0]} has no peer access to GPU {pairs[0][1]}" if pairs else None


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
    routes: torch.Tensor,
    experts: LocalExperts,
    plan: Plan,
    stages: Stages,
    group: Group,
    config: TileOverlapConfig,
) -> torch.Tensor:
    """As :func:`sequential.routed_experts`, for a group and a layer that can overlap.

    Args:
        routes: [T, k] int32 global expert ids, -1 where dropped.
    """
    home = partial(_output_home, routes=routes, maps=experts.maps, group=group, config=config)
    return sequential.routed_experts(x, weights, experts, plan, stages, home)


def _output_home(
    hidden: torch.Tensor,
    weights: ExpertWeights,
    plan: Plan,
    stages: Stages,
    routes: torch.Tensor,
    maps: WeightMaps,
    group: Group,
    config: TileOverlapConfig,
) -> torch.Tensor:
    pool, op = group.pool, group.op
    check_failure(pool)
    width = weights.down[0][2].shape[1]
    row_bytes = width * hidden.element_size()
    with stages("layout"):
        returns = choose_returns(config, plan, row_bytes)
        tiles = schedule(op, plan, routes, width, row_bytes, returns, pool.panel_done)
        pool.reserve(*(rows * row_bytes for rows in rows_to_receive(plan, returns)))
        pool.reserve_signals(tiles.num_bands * -(-width // TILE_N) * 2)
    down = maps.of(op, weights.down, hidden.dtype, transposed=False)
    comm_sms = 0 if config.comm_sms == "auto" else config.comm_sms
    return return_while_computed(group, plan, tiles, returns, hidden, down, width, comm_sms, stages)


def choose_returns(config: TileOverlapConfig, plan: Plan, row_bytes: int) -> Returns:
    """How rows come home: from the exchanged counts, so that all ranks choose alike."""
    size, each = plan.peers.size, np.arange(plan.peers.size)
    routes, sends = plan.routes.sum(2), plan.sends
    remote_routes, remote_sends = (int(counts.sum() - counts[each, each].sum()) for counts in (routes, sends))
    sums = remote_sends < SUMS_BELOW * remote_routes if config.combine == "auto" else config.combine == "sums"
    bands = config.bands_per_segment
    if bands == "auto":
        bands = max(1, SEGMENT_BYTES // (BAND * row_bytes))
    # With two ranks half of all tiles are local: while they run, everything else can travel.
    return Returns(sums, config.owner_alignment == "tile", bands, num_panels=1 if not sums or size == 2 else 4)


def rows_to_receive(plan: Plan, returns: Returns) -> tuple[int, int]:
    """The most rows that any rank of the group receives now, and that it could from as many tokens."""
    each = np.arange(plan.peers.size)
    routes = plan.routes.sum(2)
    counts = (plan.sends if returns.sums else routes).copy()
    counts[each, each] = 0
    most = routes.sum(1).max()
    return int(counts.sum(1).max()), int(most)


def return_while_computed(
    group: Group,
    plan: Plan,
    tiles: Schedule,
    returns: Returns,
    rows: torch.Tensor,
    maps: torch.Tensor,
    width: int,
    comm_sms: int,
    stages: Stages,
) -> torch.Tensor:
    """Rows [R, K] times their experts' weights, summed at the owners of their tokens: [T, width].

    The couriers are warps of the GEMM, or run beside it on ``comm_sms`` SMs; the sum follows.
    """
    op, pool, peers, (num_rows, inner) = group.op, group.pool, plan.peers, rows.shape
    is_half = rows.dtype == torch.float16
    row_bytes, panel_tiles = width * rows.element_size(), returns.panel_tiles(width)
    limit_ns = int(peers.timeout_s * NS)
    main = torch.cuda.current_stream(rows.device)
    outputs = rows.new_empty(num_rows, width)
    sums = rows.new_empty(tiles.slots.shape[0], width)
    courier = op.Courier(
        errand=op.RETURN_SUMS if returns.sums else op.RETURN_ROWS,
        rows=outputs.data_ptr(),
        row_bytes=row_bytes,
        num_peers=peers.size,
        rank=peers.rank,
        segments=tiles.segments.data_ptr(),
        num_segments=tiles.num_segments.data_ptr(),
        signals=pool.signals.data_ptr(),
        signals_per_band=2 * -(-width // TILE_N),
        index=plan.choice_rows.data_ptr(),
        num_choices=plan.top_k,
        sum_runs=tiles.sum_runs.data_ptr(),
        panel_done=pool.panel_done.data_ptr(),
        panel_targets=tiles.panel_targets.data_ptr(),
        num_panels=returns.num_panels,
        panel_bytes=panel_tiles * TILE_N * rows.element_size(),
        peer_buffers=pool.peer_buffers.data_ptr(),
        peer_arrived=pool.peer_arrived.data_ptr(),
        peer_consumed=pool.consumed.data_ptr(),
        generation_bytes=pool.capacity_bytes,
        epoch=pool.epoch.data_ptr(),
        claimed=pool.claimed_parts.data_ptr(),
        failure=pool.failure.data_ptr(),
        limit_ns=limit_ns,
    )
    with stages("expert_gemm"):
        op.begin_return(
            counts=plan.device_counts.data_ptr(),
            counts_stride=plan.device_counts.shape[1],
            num_ranks=peers.size,
            rank=peers.rank,
            num_experts=plan.num_experts,
            returns_sums=returns.sums,
            row_bytes=row_bytes,
            epoch=pool.epoch.data_ptr(),
            targets=pool.targets.data_ptr(),
            stream=main.cuda_stream,
        )
        if comm_sms:
            pool.forked.record(main)
        # The GEMM first: it waits for nobody, so whatever happens to the couriers' start, nothing is held up.
        op.expert_gemm(
            a=rows.data_ptr(),
            b_maps=maps.data_ptr(),
            c=outputs.data_ptr(),
            items=tiles.items.data_ptr(),
            num_items=tiles.num_items.data_ptr(),
            claimed=pool.claimed_items.data_ptr(),
            signals=0 if returns.sums else pool.signals.data_ptr(),
            epoch=pool.epoch.data_ptr(),
            panel_done=pool.panel_done.data_ptr() if returns.sums else 0,
            panel_tiles=panel_tiles,
            num_rows=num_rows,
            n=width,
            k=inner,
            is_half=is_half,
            b_is_transposed=False,
            num_sms=group.num_sms - comm_sms,
            courier=op.Courier() if comm_sms else courier,
            stream=main.cuda_stream,
        )
    with stages("combine"):
        if comm_sms:
            pool.stream.wait_event(pool.forked)
            op.run_couriers(courier=courier, is_half=is_half, num_sms=comm_sms, stream=pool.stream.cuda_stream)
            pool.joined.record(pool.stream)
            main.wait_event(pool.joined)
        op.sum_slots(
            received=pool.received,
            local=outputs.data_ptr(),
            slots=tiles.slots.data_ptr(),
            sums=sums.data_ptr(),
            arrived=pool.arrived.data_ptr(),
            targets=pool.targets.data_ptr(),
            epoch=pool.epoch.data_ptr(),
            peer_consumed=pool.peer_consumed.data_ptr(),
            finished=pool.finished.data_ptr(),
            failure=pool.failure.data_ptr(),
            generation_bytes=pool.capacity_bytes,
            limit_ns=limit_ns,
            num_tokens=sums.shape[0],
            num_choices=tiles.slots.shape[1],
            width=width,
            num_peers=peers.size,
            is_half=is_half,
            num_sms=group.num_sms,
            stream=main.cuda_stream,
        )
    return sums


_WAITS = {
    1: "the tiles of its own expert GEMM were not ready",
    2: "rank {peer} did not read what it received before",
    3: "rows from rank {peer} did not arrive",
}


def check_failure(pool: Pool) -> None:
    """Raises where a kernel of an earlier call gave up waiting.

    Raises:
        PeerError: names the rank and what was waited for.
    """
    kind, peer, place, expected, seen = pool.failure.tolist()
    if kind:
        what = _WAITS[kind].format(peer=pool.peers.ranks[peer] if peer >= 0 else "?")
        raise PeerError(
            f"MoE layer '{pool.peers.layer}', rank {pool.peers.ranks[pool.peers.rank]}: {what} within "
            f"{pool.peers.timeout_s:.0f} s (place {place}, expected {expected & 0xFFFFFFFF}, seen "
            f"{seen & 0xFFFFFFFF}); outputs since then are not valid"
        )


def _load_kernels(op, pool: Pool) -> None:
    """Runs every kernel once on nothing: loading one while another waits for it would never end."""
    device = pool.device
    stream = torch.cuda.current_stream(device).cuda_stream
    nothing = torch.zeros(64, dtype=torch.int32, device=device)
    zero = nothing.data_ptr()
    operand = torch.zeros(64, 64, dtype=torch.float16, device=device)
    for is_half in (False, True):
        for transposed in (False, True):
            op.expert_gemm(
                a=operand.data_ptr(), b_maps=zero, c=operand.data_ptr(), items=zero, num_items=zero,
                claimed=pool.claimed_items.data_ptr(), signals=0, epoch=zero, panel_done=0, panel_tiles=1, num_rows=64,
                n=64, k=64, is_half=is_half, b_is_transposed=transposed, num_sms=2, courier=op.Courier(), stream=stream,
            )  # fmt: skip
        op.run_couriers(courier=op.Courier(), is_half=is_half, num_sms=2, stream=stream)
        op.sum_slots(
            received=zero, local=zero, slots=zero, sums=zero, arrived=zero, targets=zero, epoch=zero,
            peer_consumed=zero, finished=pool.finished.data_ptr(), failure=pool.failure.data_ptr(), generation_bytes=0,
            limit_ns=NS, num_tokens=0, num_choices=1, width=8, num_peers=0, is_half=is_half, num_sms=1, stream=stream,
        )  # fmt: skip
    torch.cuda.synchronize(device)
