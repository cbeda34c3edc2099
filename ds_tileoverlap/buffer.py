"""Symmetric memory: the one place that allocates, grows and frees what peers write into.

One pool serves every layer of an expert-parallel group. It has a channel for each kind of row that travels; a channel's
receive buffer has two halves, used in turn, and a rank overwrites a half only after the owner has said that it read it.
A half grows to 1.25 times what the fullest rank has received at once, in steps of 2 MiB.
Words that peers write are never reset: epochs and counts go on from use to use.

    channel    carries                                                         read by
    records    for each token and rank: its expert rows there, its weights     the layout of the receiver
    tokens     the tokens themselves, one row for each token and rank          the gate and up projections
    returns    expert outputs, row by row or as sums                           the sum at the owner
    scalars    for each token and rank: the gradients of its weights there     the owner

    word       written by              read by                says
    ready      the layout of a peer    the layout             the last epoch whose counts came from the peer
    arrived    the sending peer        who reads the channel  16-byte units that came from the peer since the beginning
    consumed   who reads the channel   the sending peer       the last epoch whose rows have been read
    began      the sending peer        who begins a use       the last epoch that the peer has begun
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from .exchange import PeerError, Peers

GENERATIONS = 2
GROW_TO = 1.25
GRAIN_BYTES = 2**21
MIN_COUNTS_STRIDE = 4
CHANNELS = 4
# Words that each peer writes in a channel, and words of this rank's own beside one target for each peer.
PEER_WORDS, OWN_WORDS = 3, 4


_WAITS = {
    1: "the tiles of its own expert GEMM were not ready",
    2: "rank {peer} did not read what it received before",
    3: "rows from rank {peer} did not arrive",
    4: "the counts of rank {peer} did not come",
    5: "routes from rank {peer} did not arrive",
    6: "rank {peer} did not begin the same exchange",
    7: "rows that had arrived were not put in place",
}


def check_failure(failure: torch.Tensor, peers: Peers) -> None:
    """Raises where a kernel of an earlier call gave up waiting.

    Args:
        failure: of the Pool; its copy on the host, where the device shall not be waited for.

    Raises:
        PeerError: names the rank and what was waited for.
    """
    kind, peer, place, expected, seen = failure.tolist()
    if kind:
        what = _WAITS[kind].format(peer=peers.ranks[peer] if 0 <= peer < peers.size else "?")
        raise PeerError(
            f"MoE layer '{peers.layer}', rank {peers.ranks[peers.rank]}: {what} within {peers.timeout_s:.0f} s "
            f"(place {place}, expected {expected & 0xFFFFFFFF}, seen {seen & 0xFFFFFFFF}), in this forward or one "
            "before; outputs since then are not valid"
        )


def record_bytes(top_k: int) -> int:
    """Of one row of the records channel: the expert rows and weights of a token's choices, in pieces of 16."""
    return -(-2 * top_k // 4) * 16


def scalar_bytes(top_k: int) -> int:
    """Of one row of the scalars channel: a float32 for each choice of a token, in pieces of 16."""
    return -(-top_k // 4) * 16


def half_bytes(needed_bytes: int, most_bytes: int) -> int:
    """What half of a channel's receive buffer grows to; arguments of :meth:`Channel.reserve`."""
    wanted = max(needed_bytes, min(int(needed_bytes * GROW_TO), most_bytes))
    return -(-wanted // GRAIN_BYTES) * GRAIN_BYTES


class Channel:
    """One kind of row on its way between peers. Memory: ``2 * capacity_bytes`` on every rank.

    Attributes:
        capacity_bytes: what one half of the receive buffer holds; the same on all ranks.
        epoch, targets: device words of this rank: uses so far, what must have arrived.
        claimed, placed, finished: counters that are 0 between kernels.
        arrived, consumed, began: [W] int32 words of this rank that peers write.
        peer_buffers, peer_arrived, peer_consumed, peer_began: [W] int64 addresses at each peer.
        native: the addresses of the above, as the operator takes them.
    """

    def __init__(self, pool: Pool, words: torch.Tensor, bases: list[int], first: int, own: torch.Tensor):
        size, rank = pool.peers.size, pool.peers.rank
        self._pool, self._buffer = pool, None
        self.capacity_bytes = 0
        self.arrived, self.consumed, self.began = words[first : first + PEER_WORDS * size].split(size)
        self.peer_arrived, self.peer_consumed, self.peer_began = (
            pool.addresses([base + 4 * (first + i * size + rank) for base in bases]) for i in range(PEER_WORDS)
        )
        self.peer_buffers = pool.addresses([0] * size)
        self.epoch, self.claimed, self.placed, self.finished, self.targets = own.split([1] * OWN_WORDS + [size])
        self._remember_addresses()

    def _remember_addresses(self) -> None:
        words = ("epoch", "targets", "claimed", "placed", "finished", "arrived", "consumed", "began")
        peers = ("peer_buffers", "peer_arrived", "peer_consumed", "peer_began")
        self.native = self._pool.op.Channel(
            **{name: getattr(self, name).data_ptr() for name in (*words, *peers)},
            received=self._buffer.data_ptr() if self._buffer is not None else 0,
            generation_bytes=self.capacity_bytes,
        )

    def reserve(self, needed_bytes: int, most_bytes: int) -> None:
        """Makes each half hold what is needed. All ranks call this with the same numbers, and grow together.

        Args:
            needed_bytes: the most that any rank of the group receives now.
            most_bytes: the most that any rank could receive from as many tokens.
        """
        if needed_bytes <= self.capacity_bytes:
            return
        capacity = half_bytes(needed_bytes, most_bytes)
        # Every use of the old buffer is over on all ranks before any of them lets go of it.
        self._pool.meet()
        self.close()
        self._buffer, bases = self._pool.allocate(GENERATIONS * capacity, torch.uint8)
        self.peer_buffers, self.capacity_bytes = self._pool.addresses(bases), capacity
        self._remember_addresses()
        self._pool.meet()

    def close(self) -> None:
        self._buffer, self.capacity_bytes = None, 0
        self._remember_addresses()


class Pool:
    """The channels and signals of one group on one rank.

    Attributes:
        records, tokens, returns, scalars: the channels.
        ready: [W] int32 words of this rank that peers write; peer_ready, peer_counts: [W] int64 addresses.
        counts_stride: words of one rank's counts.
        host_counts, host_failure, host_ready: host memory that the layout's kernel writes.
        mailbox: the addresses through which counts are exchanged, by name.
        claimed_items: [1] int32, 0 between kernels.
        signals: ready signals of this rank's own tiles.
        failure: [5] int32, filled by a kernel whose deadline passed.
        stream: where couriers with SMs of their own run, of high priority.
        trace: address of the events within a traced stage, 0 elsewhere; see :mod:`ds_tileoverlap.trace`.
    """

    trace = 0

    def __init__(self, peers: Peers, device: torch.device, op):
        self.peers, self.device, self.op = peers, device, op
        on_gpu = device.type == "cuda"
        if on_gpu:
            self.stream = torch.cuda.Stream(device, priority=-1)
            self.forked, self.joined, self._order = (torch.cuda.Event() for _ in range(3))
        # The words below are ordered by one stream at a time.
        self._raw_stream: int | None = None
        self._last_stream: torch.cuda.Stream | None = None
        size = peers.size
        own_sizes = [OWN_WORDS + size] * CHANNELS + [1, op.FAILURE_WORDS]
        own = torch.zeros(sum(own_sizes), dtype=torch.int32, device=device).split(own_sizes)
        self.claimed_items, self.failure = own[CHANNELS:]
        self.counts_stride = op.MAX_EXPERTS + size + MIN_COUNTS_STRIDE
        first = PEER_WORDS * CHANNELS * size
        words, bases = self.allocate(first + size + GENERATIONS * size * self.counts_stride, torch.int32)
        words.zero_()
        self.channels = [Channel(self, words, bases, PEER_WORDS * size * i, own[i]) for i in range(CHANNELS)]
        self.records, self.tokens, self.returns, self.scalars = self.channels
        self.ready = words[first : first + size]
        self.peer_ready = self.addresses([base + 4 * (first + peers.rank) for base in bases])
        self.peer_counts = self.addresses([base + 4 * (first + size) for base in bases])
        self.host_counts = torch.zeros(size * self.counts_stride, dtype=torch.int32, pin_memory=on_gpu)
        self.host_ready = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self.host_failure = torch.zeros(op.FAILURE_WORDS, dtype=torch.int32, pin_memory=on_gpu)
        self.signals = torch.zeros(0, dtype=torch.int32, device=device)
        shared = ("peer_counts", "peer_ready", "ready", "host_counts", "host_failure", "host_ready")
        self.mailbox = {name: getattr(self, name).data_ptr() for name in shared} | {"stride": self.counts_stride}
        # Nobody may write into a peer's words before it has cleared them.
        self.meet()

    def signals_for(self, count: int) -> int:
        """Where a GEMM writes so many ready signals. They are this rank's own: growing needs nobody else."""
        if self.signals.numel() < count:
            # The current epoch is older than any that a signal will be compared with.
            self.signals = self.returns.epoch.expand(count).clone()
        return self.signals.data_ptr()

    def follow(self, stream: int) -> None:
        """Lets work queued from now on come after all earlier uses of the pool, if those were on another stream.

        A graph is captured without them: who replays it keeps the order.

        Args:
            stream: the current one, as :func:`kernels.raw_stream` names it.
        """
        if stream == self._raw_stream or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self.device)
        if self._last_stream is not None:
            self._order.record(self._last_stream)
            current.wait_event(self._order)
            self.signals.record_stream(current)
        self._raw_stream, self._last_stream = stream, current

    def close(self) -> None:
        """Frees the symmetric memory; collective over the group."""
        self.meet()
        for channel in self.channels:
            channel.close()

    def allocate(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
        """Memory that peers can write: this rank's part, uninitialised, and the addresses of all parts. Collective.

        Raises:
            torch.OutOfMemoryError: on all ranks, where one of them has none.
        """
        part = error = None
        try:
            part = self._part(count, dtype)
        except RuntimeError as found:  # the others would wait for this rank's part
            error = found
        if not self._all(part is not None):
            part_bytes = count * dtype.itemsize
            why = error or "other ranks of the expert-parallel group have none"
            raise torch.OutOfMemoryError(f"no symmetric memory of {part_bytes / 2**20:.0f} MiB: {why}") from error
        return part, list(symmetric_memory.rendezvous(part, self.peers.group).buffer_ptrs)

    def _part(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return symmetric_memory.empty(count, dtype=dtype, device=self.device)
        except RuntimeError:
            # It comes from the driver, which may have none while torch's allocator keeps plenty for itself.
            torch.cuda.empty_cache()
            return symmetric_memory.empty(count, dtype=dtype, device=self.device)

    def _all(self, well: bool) -> bool:
        """Whether all ranks of the group are well. Collective."""
        flag = torch.tensor([well], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.peers.group)
        return bool(flag.item())

    def addresses(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def meet(self) -> None:
        """Waits until every rank of the group has come here with an idle device.

        Raises:
            PeerError: a kernel of this rank gave up waiting for a peer, which will not come here either.
        """
        torch.cuda.synchronize(self.device)
        check_failure(self.failure, self.peers)
        dist.barrier(self.peers.group, device_ids=[self.device.index])
