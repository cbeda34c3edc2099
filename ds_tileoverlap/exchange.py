"""Transport between the ranks of one expert-parallel group. It knows nothing of tokens, experts or GEMMs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from deepspeed import comm as dist
from deepspeed.comm import comm as deepspeed_comm
from torch.distributed import PrefixStore, distributed_c10d

# After a failed exchange: how long a rank waits for the others to report, so that the error can name who did not.
ROLL_CALL_S = 5.0
# The host stops waiting this long before the group's limit, at which NCCL's watchdog ends the process without a name.
WATCHDOG_MARGIN_S = 2.0
# A waiting host looks at the device without pause for this long, then once a pause.
SPIN_S = 2e-3
PAUSE_S = 100e-6
# Exchange -> how often it failed on this rank.
_FAILURES: Counter[str] = Counter()
# From torch 2.13 on the collective has a new name.
_ALL_GATHER = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)


class PeerError(RuntimeError):
    """Ranks of the expert-parallel group did not take part in an exchange; the message names them."""


@dataclass(frozen=True)
class Peers:
    """The expert-parallel group as one MoE layer on one rank sees it.

    Attributes:
        group: the process group, ``None`` where ``size`` is 1.
        rank: this rank's place in the group.
        ranks: the group's global ranks, by place.
        timeout_s: how long the host waits for the others, seconds.
        layer: the layer's name in the model, for messages.
    """

    group: torch.distributed.ProcessGroup | None
    rank: int
    ranks: tuple[int, ...]
    timeout_s: float
    layer: str

    @property
    def size(self) -> int:
        return len(self.ranks)


def peers_of(
    group: torch.distributed.ProcessGroup | None, device: torch.device, timeout_s: float | None, layer: str
) -> Peers:
    """The :class:`Peers` of a process group.

    Args:
        group: the expert-parallel group; ``None`` or a group of one needs no exchange.
        device: where the exchanged tensors live; its backend's time-out is the group's own.
        timeout_s: the limit asked for, seconds; it becomes the group's own for what it exchanges from here on.
        layer: the layer's name, for messages.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Peers(None, 0, (0,), 0.0, layer)
    if timeout_s is None:
        timeout_s = group._get_backend(device).options._timeout.total_seconds()
    else:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return Peers(group, dist.get_rank(group), tuple(torch.distributed.get_process_group_ranks(group)), timeout_s, layer)


def all_gather_counts(counts: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Every rank's row of counts.

    Args:
        counts: [n] int32, the same n on every rank.

    Returns:
        [W, n] int32, by place in the group, on the device of ``counts``.

    Raises:
        PeerError: a rank did not take part.
    """
    if peers.size == 1:
        return counts.unsqueeze(0)
    gathered = counts.new_empty(peers.size * counts.numel())
    try:
        all_gather = dist.all_gather_into_tensor if _are_logged() else _ALL_GATHER
        all_gather(gathered, counts, group=peers.group)
    except RuntimeError as error:
        raise peer_error(peers, "layout", error) from error
    return gathered.view(peers.size, counts.numel())


def all_to_all_rows(
    rows: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], peers: Peers, stage: str
) -> torch.Tensor:
    """Sends each destination its run of rows.

    Args:
        rows: [S, width], grouped by destination, contiguous.
        send_splits: rows for each rank, sum S.
        recv_splits: rows from each rank.
        stage: the pipeline stage that asks, for messages.

    Returns:
        [sum(recv_splits), width], grouped by source.

    Raises:
        PeerError: a rank did not take part.
    """
    if peers.size == 1:
        return rows
    received = rows.new_empty(sum(recv_splits), rows.shape[1])
    try:
        all_to_all = dist.all_to_all_single if _are_logged() else torch.distributed.all_to_all_single
        all_to_all(received, rows, list(recv_splits), list(send_splits), group=peers.group)
    except RuntimeError as error:
        raise peer_error(peers, stage, error) from error
    return received


class HostCopy:
    """A device tensor on its way to the host: started here, waited for where the values are first needed."""

    def __init__(self, tensor: torch.Tensor, peers: Peers):
        self._peers = peers
        self._ready = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def wait(self) -> torch.Tensor:
        """The values, on the host.

        Raises:
            PeerError: the group's limit passed before the values came.
        """
        if self._ready is None:
            return self._host
        if self._peers.size == 1:
            self._ready.synchronize()
            return self._host
        start, limit_s = time.monotonic(), self._peers.timeout_s - WATCHDOG_MARGIN_S
        while not self._ready.query():
            waited_s = time.monotonic() - start
            if waited_s > limit_s:
                raise peer_error(self._peers, "layout", f"nothing came within {limit_s:.0f} s")
            if waited_s > SPIN_S:
                time.sleep(PAUSE_S)
        return self._host


def _are_logged() -> bool:
    """Whether DeepSpeed counts collectives: only then are they called through it, which costs the host time."""
    return deepspeed_comm.comms_logger.enabled


def peer_error(peers: Peers, stage: str, cause: object) -> PeerError:
    """A failed exchange as an error that says which ranks were not there."""
    missing = _roll_call(peers, stage)
    who = f"ranks {missing} did not take part" if missing else "every rank was there, yet the exchange failed"
    return PeerError(
        f"tile_overlap: exchange of stage '{stage}' in layer '{peers.layer}' failed on rank {peers.ranks[peers.rank]}: "
        f"of the expert-parallel ranks {list(peers.ranks)}, {who}. Look at the log of those ranks first. The exchange "
        f"said: {cause}"
    )


def _roll_call(peers: Peers, stage: str) -> list[int]:
    """Global ranks of the group that do not report within :data:`ROLL_CALL_S` that they failed in this exchange too."""
    missing = []
    exchange = f"tile_overlap/{peers.layer}/{stage}/{peers.ranks}"
    _FAILURES[exchange] += 1
    try:
        # Numbered, so that a report of an earlier failure is not taken for one of this.
        store = PrefixStore(f"{exchange}/{_FAILURES[exchange]}", distributed_c10d._get_default_store())
        store.set(str(peers.rank), "waiting")
        deadline = time.monotonic() + ROLL_CALL_S
        for place, rank in enumerate(peers.ranks):
            if place == peers.rank:
                continue
            left_s = max(deadline - time.monotonic(), 0.05)
            try:
                store.wait([str(place)], timedelta(seconds=left_s))
            except RuntimeError:
                # A wait fails alike where the time is over and where the store is gone; only then this fails, too.
                if not store.check([str(place)]):
                    missing.append(rank)
    except RuntimeError:
        # The rendezvous store lives in the process of rank 0: when it is gone, so is that rank.
        return [0]
    return missing
