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

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from . import sequential
from .buffer import Pool, pool_of
from .config import TileOverlapConfig
from .exchange import PeerError, Peers
from .expert_weights import ExpertWeights
from .layout import Plan
from .local_experts import LocalExperts
from .schedule import TILE_N, Schedule, schedule
from .stages import Stages
from .weight_maps import WeightMaps

MAX_PEERS = 128
# A waiting kernel gives up this long after the group's own limit, so that the host's error comes first where it can.
NS = 1_000_000_000
# What one SM writes to a peer, and the link's limit; bytes/s on H200.
SM_RATE, LINK_RATE = 45e9, 355e9
SEGMENT_BYTES = 2**21


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
        if found.reason and peers.rank == 0:
            logger.info(f"tile_overlap: sequential instead of overlap, as {found.reason}")
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
        except Exception as error:  # whatever a compiler may say: the job goes on without the operator
            reason = f"the kernels could not be built: {error}"
    ours = (reason, socket.gethostname(), _uuid(device) if device.type == "cuda" else "")
    everyone: list = [None] * peers.size
    dist.all_gather_object(everyone, ours, group=peers.group)
    reason = _common_refusal(everyone, peers)
    if reason is not None:
        return Group(None, reason, None)
    pool = pool_of(peers, device)
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
    if peers.size > MAX_PEERS:
        return f"the expert-parallel group has {peers.size} ranks, more than {MAX_PEERS}"
    # Peer access is symmetric and this asks about all pairs, where all devices are visible to every rank.
    uuids = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    visible = [uuids[uuid] for _, _, uuid in everyone if uuid in uuids]
    pairs = [(a, b) for a in visible for b in visible if a != b and not torch.cuda.can_device_access_peer(a, b)]
    return f"GPU {pairs[0][0]} has no peer access to GPU {pairs[0][1]}" if pairs else None


def refusal(experts: LocalExperts, dtype: torch.dtype, num_experts: int, op) -> str | None:
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
    pool, op, peers = group.pool, group.op, plan.peers
    check_failure(pool)
    width = weights.down[0][2].shape[1]
    row_bytes = width * hidden.element_size()
    with stages("layout"):
        comm_sms, bands = choose(config, plan, width, hidden.shape[1], row_bytes, group.num_sms)
        plan_of_tiles = schedule(op, plan, routes, width, row_bytes, config.owner_alignment == "tile", bands)
        remote = plan.routes.sum(2)
        remote[range(peers.size), range(peers.size)] = 0
        received = remote.sum(1)
        pool.reserve(int(received.max()) * row_bytes, int(plan.routes.sum((1, 2)).max()) * row_bytes)
        pool.reserve_signals(plan_of_tiles.num_bands * -(-width // TILE_N) * 2)
    down = maps.of(op, weights.down, hidden.dtype, transposed=False)
    return return_while_computed(op, pool, plan, plan_of_tiles, hidden, down, width, comm_sms, group.num_sms, stages)


def choose(
    config: TileOverlapConfig, plan: Plan, width: int, inner: int, row_bytes: int, num_sms: int
) -> tuple[int, int]:
    """SMs for communication and bands in one transfer, the same on every rank as far as it matters to others."""
    routes = plan.routes
    bands = config.bands_per_segment
    if bands == "auto":
        bands = max(1, SEGMENT_BYTES // (128 * row_bytes))
    if config.comm_sms != "auto":
        return config.comm_sms, bands
    rows = routes[:, plan.peers.rank].sum()
    sent_bytes = (rows - routes[plan.peers.rank, plan.peers.rank].sum()) * row_bytes
    flops = 2.0 * rows * width * inner

    def time_s(comm_sms: int) -> float:
        compute = flops / (5.2e12 * (num_sms - comm_sms))
        return max(compute, sent_bytes / min(comm_sms * SM_RATE, LINK_RATE))

    return min(range(2, 18, 2), key=time_s), bands


def return_while_computed(
    op,
    pool: Pool,
    plan: Plan,
    tiles: Schedule,
    rows: torch.Tensor,
    maps: torch.Tensor,
    width: int,
    comm_sms: int,
    num_sms: int,
    stages: Stages,
) -> torch.Tensor:
    """Rows [R, K] times their experts' weights, summed at the owners of their tokens: [T, width].

    The GEMM runs on the current stream and the return beside it, on ``comm_sms`` SMs; the sum follows.
    """
    peers, (num_rows, inner) = plan.peers, rows.shape
    is_half = rows.dtype == torch.float16
    row_bytes, column_tiles = width * rows.element_size(), -(-width // TILE_N)
    limit_ns = int(peers.timeout_s * NS)
    half = pool.capacity_bytes
    main = torch.cuda.current_stream(rows.device)
    outputs = rows.new_empty(num_rows, width)
    sums = rows.new_empty(tiles.slots.shape[0], width)
    with stages("expert_gemm"):
        op.begin_return(
            counts=plan.device_counts.data_ptr(),
            counts_stride=plan.device_counts.shape[1],
            num_ranks=peers.size,
            rank=peers.rank,
            num_experts=plan.num_experts,
            row_bytes=row_bytes,
            epoch=pool.epoch.data_ptr(),
            targets=pool.targets.data_ptr(),
            stream=main.cuda_stream,
        )
        pool.forked.record(main)
        # The GEMM first: it waits for nobody, so whatever happens to the return's start, nothing is held up.
        op.expert_gemm(
            a=rows.data_ptr(),
            b_maps=maps.data_ptr(),
            c=outputs.data_ptr(),
            items=tiles.items.data_ptr(),
            num_items=tiles.num_items.data_ptr(),
            claimed=pool.claimed_items.data_ptr(),
            signals=pool.signals.data_ptr(),
            epoch=pool.epoch.data_ptr(),
            num_rows=num_rows,
            n=width,
            k=inner,
            is_half=is_half,
            b_is_transposed=False,
            num_sms=num_sms - comm_sms,
            stream=main.cuda_stream,
        )
    with stages("combine"):
        pool.stream.wait_event(pool.forked)
        op.return_segments(
            rows=outputs.data_ptr(),
            segments=tiles.segments.data_ptr(),
            num_segments=tiles.num_segments.data_ptr(),
            claimed=pool.claimed_parts.data_ptr(),
            signals=pool.signals.data_ptr(),
            epoch=pool.epoch.data_ptr(),
            peer_buffers=pool.peer_buffers.data_ptr(),
            peer_arrived=pool.peer_arrived.data_ptr(),
            peer_consumed=pool.consumed.data_ptr(),
            failure=pool.failure.data_ptr(),
            generation_bytes=half,
            limit_ns=limit_ns,
            row_bytes=row_bytes,
            signals_per_band=2 * column_tiles,
            num_peers=peers.size,
            num_sms=comm_sms,
            stream=pool.stream.cuda_stream,
        )
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
            generation_bytes=half,
            limit_ns=limit_ns,
            num_tokens=sums.shape[0],
            num_choices=tiles.slots.shape[1],
            width=width,
            num_peers=peers.size,
            is_half=is_half,
            num_sms=num_sms,
            stream=main.cuda_stream,
        )
    return sums


_WAITS = {
    1: "a tile of this rank's own expert GEMM was not ready",
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
                claimed=pool.claimed_items.data_ptr(), signals=0, epoch=zero, num_rows=64, n=64, k=64, is_half=is_half,
                b_is_transposed=transposed, num_sms=2, stream=stream,
            )  # fmt: skip
        op.sum_slots(
            received=zero, local=zero, slots=zero, sums=zero, arrived=zero, targets=zero, epoch=zero,
            peer_consumed=zero, finished=pool.finished.data_ptr(), failure=pool.failure.data_ptr(), generation_bytes=0,
            limit_ns=NS, num_tokens=0, num_choices=1, width=8, num_peers=0, is_half=is_half, num_sms=1, stream=stream,
        )  # fmt: skip
    op.return_segments(
        rows=zero, segments=zero, num_segments=zero, claimed=pool.claimed_parts.data_ptr(), signals=zero, epoch=zero,
        peer_buffers=zero, peer_arrived=zero, peer_consumed=zero, failure=pool.failure.data_ptr(), generation_bytes=0,
        limit_ns=NS, row_bytes=16, signals_per_band=2, num_peers=0, num_sms=2, stream=stream,
    )  # fmt: skip
    torch.cuda.synchronize(device)
