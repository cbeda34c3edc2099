"""Ranks of the overlap backend as threads of one process: their pools, their layers, and guards to take away."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace

import torch
from models import ours

from ds_tileoverlap import buffer, overlap_group
from ds_tileoverlap.exchange import Peers

H, E = 64, 8
NO_STREAM = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
GUARDS = {
    "tiles wait until what arrives is in place": (
        "arrivals.cuh",
        "    if (!wait_until([&] { return read_signal(missing) == 0; }",
        "    if (false && !wait_until([&] { return read_signal(missing) == 0; }",
    ),
    "what arrives is read after it came": (
        "arrivals.cuh",
        "        if (peer != known && in_time) {",
        "        if (false) {",
    ),
    "couriers wait for finished tiles": (
        "sums.cuh",
        "if (panel == ready || !courier.in_time) return;",
        "return;",
    ),
    "the sum waits for what comes": (
        "combine.cu",
        "    all_reached(args.arrived, [&](int peer) { return args.targets[peer]; }, args.num_peers, ROWS_ARRIVED, "
        "args.failure,\n                args.limit_ns);\n    if (threadIdx.x == 0) record",
        "    if (threadIdx.x == 0) record",
    ),
    "routes are read after they came": (
        "layout.cu",
        "bool in_time = all_reached(\n        args.arrived, [&](int r) { return args.targets[r]; }, args.num_ranks, "
        "ROUTES_ARRIVED, args.failure, args.limit_ns);",
        "bool in_time = true;",
    ),
}


class ThreadPools:
    """The pools of ranks that are threads: what one allocates, the others can write."""

    def __init__(self, size, op, timeout_s=20.0):
        self.size, self.op, self.timeout_s = size, op, timeout_s
        self.barrier, self.parts = threading.Barrier(size, timeout=60), [[] for _ in range(size)]
        self.peers = [Peers(None, rank, tuple(range(size)), timeout_s, "test") for rank in range(size)]

    def run(self, function, *arguments):
        """``function(rank, group, peers, *arguments)`` on every rank; a failure anywhere ends all of them."""

        def on(rank):
            peers = self.peers[rank]
            try:
                pool = ThreadPool(self, peers)
                return function(rank, overlap_group.Group(self.op, None, pool, 4), peers, *arguments)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as executor:
            futures = [executor.submit(on, rank) for rank in range(self.size)]
            # The first to fail is the one to look at: the others only miss it.
            for future in as_completed(futures):
                if error := future.exception():
                    raise error
            return [future.result() for future in futures]


class ThreadPool(buffer.Pool):
    def __init__(self, pools, peers):
        self._pools = pools
        super().__init__(peers, torch.device("cpu"), pools.op)
        event = SimpleNamespace(record=lambda stream: None)
        self.stream, self.forked, self.joined = NO_STREAM, event, event

    def allocate(self, count, dtype):
        # Dirty memory: NaN for who reads numbers, no row for who reads positions.
        part = torch.full((count,), 0xFF if dtype == torch.uint8 else -1, dtype=dtype)
        self._pools.parts[self.peers.rank].append(part)
        self.meet()
        return part, [parts[-1].data_ptr() for parts in self._pools.parts]

    def meet(self):
        self._pools.barrier.wait()


class GROUPS:
    """The group of the rank that this thread is."""

    local = threading.local()

    @staticmethod
    def by_thread():
        return GROUPS.local.group


def layer_of(rank, peers, full, options, grouped):
    """One rank's part of a layer on the overlap backend."""
    local = E // peers.size
    layer = ours(full, "overlap", **options)
    inner = layer.deepspeed_moe
    inner.experts.deepspeed_experts = inner.experts.deepspeed_experts[rank * local : (rank + 1) * local]
    inner.num_local_experts, inner.ep_size = local, peers.size
    if grouped:
        flatten(inner.experts)
    inner.tile_overlap.peers = lambda *_: peers
    # Tracing, which finds the experts' form, is not for several threads at once.
    assert inner.tile_overlap.experts(inner.experts.deepspeed_experts).form is not None
    return layer


def flatten(module):
    """One buffer for all parameters in their order, as ZeRO has it: experts are evenly spaced, gate next to up."""
    parameters = list(module.parameters())
    buffer = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, piece in zip(parameters, buffer.split([p.numel() for p in parameters])):
        parameter.data = piece.view_as(parameter)
