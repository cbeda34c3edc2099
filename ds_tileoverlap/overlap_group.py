"""What an expert-parallel group can do: whether its machines can overlap, its operator, and its symmetric memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .buffer import Pool, check_failure
from .exchange import Peers, peer_error
from .kernels import raw_stream
from .log import say
from .schedule import SEGMENT_BYTES

if TYPE_CHECKING:
    from .planning.profile import Profile

NS = 1_000_000_000


@dataclass
class Group:
    """What an expert-parallel group can do.

    Attributes:
        op: the compiled operator; ``None`` where some rank cannot run it.
        reason: why not.
        pool: the symmetric memory.
        profile: rates of these GPUs by which ``auto`` decides, the same on all ranks; ``None`` where nobody knows them.
        decided: why a layer is sequential, if it is, by layer and number of tokens.
    """

    op: object | None
    reason: str | None
    pool: Pool | None
    num_sms: int = 0
    profile: Profile | None = None
    decided: dict[tuple, str | None] = field(default_factory=dict)

    @property
    def comm_sms(self) -> int:
        """What ``comm_sms: "auto"`` means here."""
        return self.profile.comm_sms if self.profile else 0

    @property
    def segment_bytes(self) -> int:
        """Of one transfer of rows, where ``bands_per_segment`` is "auto"."""
        return self.profile.segment_bytes if self.profile else SEGMENT_BYTES


_GROUPS: dict[dist.ProcessGroup | None, Group] = {}


def group_of(peers: Peers, device: torch.device, profile: str = "auto") -> Group:
    """What the group can do, found out at the first call, which is collective.

    Args:
        profile: of ds_config.
    """
    found = _GROUPS.get(peers.group)
    if found is None:
        found = _GROUPS[peers.group] = _examine(peers, device, profile)
        if peers.rank == 0:
            members = ", ".join(map(str, peers.ranks))
            why_not = f"sequential instead of overlap, as {found.reason}"
            rates = f", profile {found.profile.name}" if found.profile else ""
            say(why_not if found.reason else f"overlap on ranks {members}{rates}", every_rank=peers.size > 1)
    return found


def close() -> None:
    """Frees the symmetric memory of all groups; a later forward makes it anew.

    All ranks call it, when no backward is still to come.
    """
    for group in list(_GROUPS):
        if pool := _GROUPS.pop(group).pool:
            pool.close()


def check_failures() -> None:
    """Waits for the device, and raises where a kernel gave up waiting: what was computed since then is not valid.

    For who saves weights: of a backward that gave up, the next forward tells, which may not come.

    Raises:
        PeerError: as of :func:`buffer.check_failure`.
    """
    for group in _GROUPS.values():
        if group.pool:
            check_failure(group.pool.failure, group.pool.peers)


def _examine(peers: Peers, device: torch.device, profile: str) -> Group:
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
    everyone, rates = _gathered(ours, peers, profile)
    reason = _common_refusal(everyone, peers) or _first_reason(_no_peer_access(everyone), peers)
    pool = None
    if reason is None:
        try:
            pool = Pool(peers, device, op)
            _load_kernels(op, pool)
        except RuntimeError as error:  # containers and drivers forbid it in ways that only trying shows
            reason = f"symmetric memory could not be made: {error}"
        reason = _first_reason(reason, peers)
    if reason is not None:
        return Group(None, reason, None)
    if rates is not None and profile == "auto":
        rates = _confirmed(rates, peers, device)
    return Group(op, None, pool, torch.cuda.get_device_properties(device).multi_processor_count, rates)


def _gathered(
    ours: tuple[str | None, str, str], peers: Peers, profile: str
) -> tuple[list[tuple[str | None, str, str]], Profile | None]:
    """What each rank reported, and the first one's rates: files differ between users and machines."""
    rates = None
    if peers.rank == 0 and ours[0] is None:
        from .planning import machine  # with PyYAML, for those alone who overlap

        try:
            rates, ignored = machine.find(profile, machine.describe(peers.size))
        except Exception as error:  # no home, no rights: the other ranks wait, and nothing depends on it
            ignored = [f"no profile, as {type(error).__name__}: {error}"]
        for line in ignored:
            say(line, every_rank=True)
    everyone: list = [None] * peers.size
    try:
        dist.all_gather_object(everyone, (ours, rates), group=peers.group)
    except RuntimeError as error:
        raise peer_error(peers, "layout", error) from error
    return [reported for reported, _ in everyone], everyone[0][1]


def _confirmed(rates: Profile, peers: Peers, device: torch.device) -> Profile | None:
    """A profile that was found by the machine's name, if the machine is as fast as it says; the same on all ranks."""
    from .planning import confirm

    reason = confirm.why_not(rates, peers, device)
    if reason and peers.rank == 0:
        advice = f'ds-tileoverlap tune measures again, "profile": "{rates.name}" takes it all the same'
        say(f"profile {rates.name} is ignored, as {reason}; {advice}", every_rank=True)
    return None if reason else rates


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
    if reason := _with_rank([reason for reason, _, _ in everyone], peers):
        return reason
    hosts = {host for _, host, _ in everyone}
    if len(hosts) > 1:
        return f"the expert-parallel group spans {len(hosts)} machines ({', '.join(sorted(hosts))})"
    if len({uuid for _, _, uuid in everyone}) < peers.size:
        return "ranks of the expert-parallel group share a GPU"
    return None


def _first_reason(reason: str | None, peers: Peers) -> str | None:
    """The first rank's reason that has one, alike on all ranks. Collective."""
    reasons: list = [None] * peers.size
    dist.all_gather_object(reasons, reason, group=peers.group)
    return _with_rank(reasons, peers)


def _with_rank(reasons: list[str | None], peers: Peers) -> str | None:
    return next((f"{reason} (rank {peers.ranks[i]})" for i, reason in enumerate(reasons) if reason), None)


def _no_peer_access(everyone: list[tuple[str | None, str, str]]) -> str | None:
    """Which two of the group's GPUs cannot reach each other, as far as this rank sees them."""
    uuids = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    visible = [uuids[uuid] for _, _, uuid in everyone if uuid in uuids]
    pairs = [(a, b) for a in visible for b in visible if a != b and not torch.cuda.can_device_access_peer(a, b)]
    return f"GPU {pairs[0][0]} has no peer access to GPU {pairs[0][1]}" if pairs else None


def _load_kernels(op, pool: Pool) -> None:
    """Runs every kernel that waits once on nothing: loading one while another waits for it would never end."""
    device = pool.device
    nothing = torch.zeros(64, dtype=torch.int32, device=device)
    zero, stream = nothing.data_ptr(), raw_stream(nothing)
    matrix = torch.zeros(64, 64, dtype=torch.float16, device=device)
    maps = torch.empty(2 * op.MAP_BYTES, dtype=torch.uint8, device=device)
    operand = matrix.data_ptr()
    gemm = dict(
        a=operand, b_maps=zero, c=operand, items=zero, num_items=zero, claimed=pool.claimed_items.data_ptr(),
        num_rows=64, n=64, k=64, num_sms=2, stream=stream,
    )  # fmt: skip
    gated = dict(up_maps=zero, up=operand, stride=64, hidden=operand, row_weights=zero, alpha=1.0, limit=1.0, shift=0.0)
    # Nobody to wait for, no tokens and no rows.
    nothing_to_do = op.Exchange(
        counts=zero, counts_stride=0, num_ranks=0, rank=0, num_experts=0, num_choices=1, num_tokens=0,
        claimed_items=zero, num_sms=2, failure=pool.failure.data_ptr(), limit_ns=NS,
    )  # fmt: skip
    channel = op.Channel(
        epoch=operand, targets=zero, claimed=zero, placed=zero, finished=zero, arrived=zero, consumed=zero, began=zero,
        peer_buffers=zero, peer_arrived=zero, peer_consumed=zero, peer_began=zero, received=zero, generation_bytes=0,
    )  # fmt: skip
    for is_half in (False, True):
        for transposed in (False, True):
            op.expert_gemm(is_half=is_half, b_is_transposed=transposed, **gemm)
        op.expert_gemm(is_half=is_half, b_is_transposed=False, **gemm, **gated)
        op.weight_grads(
            nothing_to_do, stream, grads=operand, rows=operand, c=operand, row_offsets=zero, maps=maps.data_ptr(),
            num_experts=1, num_rows=1, n=64, k=64, is_half=is_half,
        )  # fmt: skip
        op.run_couriers(is_half=is_half, num_sms=2, stream=stream)
        op.sum_returned(
            nothing_to_do, channel, stream, local=zero, slots=zero, sums=zero, num_tokens=0, width=8, is_half=is_half
        )
    op.place(
        nothing_to_do, channel, stream, experts=zero, weights=zero, block_counts=zero, bases=zero, returns_sums=False,
        sent_tokens=zero, choice_slots=zero, token_slots=zero, slots=zero,
    )  # fmt: skip
    op.schedule_and_receive(
        nothing_to_do, channel, [], zero, stream, num_received=0, choice_rows=zero, row_sources=zero, row_weights=zero,
        row_offsets=zero,
    )  # fmt: skip
    tiles = op.Tiling(
        n=8, row_bytes=16, aligns_owners=False, bands_per_segment=1, panel_tiles=1, num_panels=1, local_first=False
    )
    scalars = dict(values=zero, index=zero, choice_slots=zero, slots=zero, own_first=0, own_end=0)
    op.send_scalars(nothing_to_do, channel, tiles, stream, **scalars)
    op.collect_scalars(nothing_to_do, channel, tiles, stream, **scalars)
    torch.cuda.synchronize(device)
