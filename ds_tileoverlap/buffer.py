"""Symmetric memory: the one place that allocates, grows and frees what peers write into.

One pool serves every layer of an expert-parallel group. Its receive buffer has two halves, used in turn by successive
returns; a rank overwrites a half only after the owner has said that it read it (``consumed``). Words that peers write
are never reset: epochs and counts go on from use to use.

    word       written by            read by             says
    arrived    the sending peer      the owner's sum     16-byte units that came from the peer since the beginning
    consumed   the owner's sum       the sending peer    the last epoch whose rows the owner has read
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from .exchange import Peers

GENERATIONS = 2
GROW_TO = 1.25
GRAIN_BYTES = 2**21


class Pool:
    """The buffers and signals of one group on one rank. Memory: ``2 * capacity_bytes`` and a few kilobytes.

    Attributes:
        capacity_bytes: what one half of the receive buffer holds; the same on all ranks.
        epoch, targets, claimed_items, claimed_parts, finished: device words of this rank, see ``csrc/combine.cuh``.
        panel_done: [max panels] int32, counts finished tiles, see ``csrc/expert_gemm.cuh``.
        arrived, consumed: [W] int32 words of this rank that peers write.
        peer_buffers, peer_arrived, peer_consumed: [W] int64 addresses at each peer.
        failure: [5] int32 on the host, filled by a kernel whose deadline passed.
        stream: where returns run, of high priority.
    """

    def __init__(self, peers: Peers, device: torch.device, max_panels: int):
        self.peers, self.device = peers, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()
        size = peers.size
        own = torch.zeros(4 + max_panels + size, dtype=torch.int32, device=device)
        self.epoch, self.claimed_items, self.claimed_parts, self.finished, self.panel_done, self.targets = own.split(
            [1, 1, 1, 1, max_panels, size]
        )
        self.failure = torch.zeros(5, dtype=torch.int32, pin_memory=True)
        words = symmetric_memory.empty(2 * size, dtype=torch.int32, device=device).zero_()
        self._words = symmetric_memory.rendezvous(words, peers.group)
        self.arrived, self.consumed = words.split(size)
        bases = self._words.buffer_ptrs
        self.peer_arrived = self._addresses([base + 4 * peers.rank for base in bases])
        self.peer_consumed = self._addresses([base + 4 * (size + peers.rank) for base in bases])
        self.signals = torch.zeros(0, dtype=torch.int32, device=device)
        self.capacity_bytes = 0
        self._buffer = None
        self.peer_buffers = self._addresses([0] * size)
        # Nobody may write into a peer's words before it has cleared them.
        self._meet()

    def reserve(self, needed_bytes: int, most_bytes: int) -> None:
        """Makes each half hold what is needed. All ranks call this with the same numbers, and grow together.

        Args:
            needed_bytes: the most that any rank of the group receives now.
            most_bytes: the most that any rank could receive from as many tokens.
        """
        if needed_bytes <= self.capacity_bytes:
            return
        wanted = max(needed_bytes, min(int(needed_bytes * GROW_TO), most_bytes))
        capacity = -(-wanted // GRAIN_BYTES) * GRAIN_BYTES
        # Every return and sum on the old buffer is over on all ranks before any of them lets go of it.
        self._meet()
        self._buffer = None
        buffer = symmetric_memory.empty(GENERATIONS * capacity, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(buffer, self.peers.group)
        self._buffer, self._handle, self.capacity_bytes = buffer, handle, capacity
        self.peer_buffers = self._addresses(handle.buffer_ptrs)
        self._meet()

    @property
    def received(self) -> int:
        """The address of this rank's receive buffer."""
        return self._buffer.data_ptr() if self._buffer is not None else 0

    def reserve_signals(self, count: int) -> None:
        """Makes room for ready signals of a GEMM. They are this rank's own: growing needs nobody else."""
        if self.signals.numel() < count:
            # Zero is older than any epoch to come: epochs start at 1, and a wrap needs 2^31 uses.
            self.signals = self.epoch.expand(count).clone() if count else self.signals

    def close(self) -> None:
        """Frees the symmetric memory; collective over the group."""
        self._meet()
        self._buffer = self._handle = self._words = None
        self.capacity_bytes = 0

    def _addresses(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.peers.group, device_ids=[self.device.index])


_POOLS: dict[dist.ProcessGroup, Pool] = {}


def pool_of(peers: Peers, device: torch.device, max_panels: int) -> Pool:
    """The group's pool; the first call is collective."""
    pool = _POOLS.get(peers.group)
    if pool is None:
        pool = _POOLS[peers.group] = Pool(peers, device, max_panels)
    return pool


def close_pools() -> None:
    """Frees the symmetric memory of all groups; all ranks call this, with nothing left to run."""
    for group in list(_POOLS):
        _POOLS.pop(group).close()
