"""Stage 2, layout, where ranks write into each other's memory: no collective, and one wait of the host for the counts.

The same :class:`~ds_tileoverlap.layout.Plan` as ``layout.layout`` makes; positions are computed by ``csrc/layout.cu``.
Between the two halves of the stage the host prepares the next ones: once the counts are there, the device waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .buffer import check_failure, record_bytes
from .config import TileOverlapConfig
from .exchange import WATCHDOG_MARGIN_S, Peers, peer_error
from .kernels import raw_stream
from .layout import CANNOT_OVERLAP, RUNS_MODULES, Plan, Tally
from .overlap_group import NS, Group
from .route import Routes
from .schedule import ARRIVALS, BAND, SEGMENT_BYTES, Returns, Schedule, tilings

if TYPE_CHECKING:
    from .planning.choices import Choices

# Sums return where they are so many times fewer than rows: adding up costs memory traffic, and starts later.
SUMS_BELOW = 0.6


class Counting:
    """The stage, begun: the counts are on their way, and the host can prepare what does not depend on them.

    Args:
        routes: the router's choices for this rank's T tokens.
        num_experts: E, over all ranks.
        peers: the expert-parallel group.
        row_bytes: of one hidden row.
        can_overlap: whether this rank can run the overlap backend now; the others learn of it with the counts.
        choices: whether the layer overlaps, where a profile decides.
        runs_modules: whether this rank's experts run module by module, of which the others learn as well.

    Attributes:
        exchange: what all stages of this forward and its backward share, as the operator takes it.
        counts: [W, E + W + 1] int32 on the device, of which the exchange knows the address.
        plan: what :meth:`finish` returned.
        schedules: the tiles of the GEMMs that it was told of, by their columns and how their rows return.
    """

    def __init__(
        self,
        routes: Routes,
        num_experts: int,
        peers: Peers,
        group: Group,
        config: TileOverlapConfig,
        row_bytes: int,
        can_overlap: bool,
        choices: Choices | None = None,
        runs_modules: bool = False,
    ):
        op, pool, size, experts = group.op, group.pool, peers.size, routes.experts
        if experts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"MoE layer '{peers.layer}' cannot be captured into a CUDA graph, as the host waits for the counts of "
                "the other ranks; capture the parts around it"
            )
        pool.follow(raw_stream(experts))
        self.plan: Plan | None = None
        self._is_finishing = False
        self.schedules: dict[tuple[int, Returns], Schedule] = {}
        self._experts, self._weights = experts, routes.weights.detach().contiguous()
        self.peers, self.group, self.config, self.row_bytes = peers, group, config, row_bytes
        self._num_experts, self._stream = num_experts, raw_stream(experts)
        self._choices = choices
        num_tokens, top_k = experts.shape
        keys, num_blocks, positions = num_experts + size, -(-num_tokens // op.BLOCK_TOKENS), num_tokens * top_k
        sizes = [num_blocks * keys, size * (keys + 1), 2 * keys + 1, 3 * positions, num_experts // size + 1]
        parts = experts.new_empty(sum(sizes)).split_with_sizes(sizes)
        self._block_counts, self.counts, self._bases, positions, self._row_offsets = parts
        self._choice_slots, self._token_slots, self._slots = positions.view(3, num_tokens, top_k)
        self.exchange = exchange_of(group, peers, self.counts, num_experts, num_tokens, top_k)
        self._ready_before = int(pool.host_ready) & 0xFFFFFFFF
        op.count(
            self.exchange,
            pool.records.native,
            self._stream,
            experts=experts.data_ptr(),
            word=CANNOT_OVERLAP * (not can_overlap) | RUNS_MODULES * runs_modules,
            block_counts=self._block_counts.data_ptr(),
            bases=self._bases.data_ptr(),
            **pool.mailbox,
        )

    def finish(self, arriving: Sequence[int] = (), returning: Sequence[int] = ()) -> Plan:
        """Waits for the counts of all ranks and queues the rest; the Plan also says how rows return.

        Args:
            arriving, returning: columns of the GEMMs of rows that arrive, and of those whose rows return.

        Raises:
            PeerError: the counts of a rank did not come.
        """
        self._is_finishing = True
        sums, tally, sent_tokens = self._placed()
        returns = returns_of(self.config, sums, self.row_bytes, self.group.segment_bytes)
        overlaps = tally.all_can_overlap and not (self._choices and self._choices.why_sequential(tally.most_routed))
        gemms = [(n, ARRIVALS) for n in dict.fromkeys(arriving)] + [(n, returns) for n in dict.fromkeys(returning)]
        schedules = tilings(self.group.op, self.row_bytes, gemms) if overlaps else []
        choice_rows, row_sources, row_weights = self._received(tally, schedules)
        self.schedules.update({(schedule.n, schedule.returns): schedule for schedule in schedules})
        host_counts = self.group.pool.host_counts[: self.counts.numel()].clone()
        size, top_k = self.peers.size, self._experts.shape[1]
        self.plan = Plan(
            self.peers,
            host_counts.view(size, -1),
            self.counts.view(size, -1),
            sent_tokens[: tally.num_sent],
            self._choice_slots,
            self._token_slots,
            choice_rows[: tally.num_received * top_k].view(-1, top_k),
            row_sources[: tally.num_rows],
            row_weights[: tally.num_rows].view(torch.float32),
            self._row_offsets,
            self._slots,
            returns,
            overlaps,
        ).but(tally=tally)
        return self.plan

    def settle(self) -> None:
        """Where something raised before :meth:`finish`: reads what the other ranks say now.

        Otherwise a later forward, after an error that all ranks have caught, would wait for it.
        """
        if not self._is_finishing:
            self.finish()

    def _placed(self) -> tuple[bool, Tally, torch.Tensor]:
        """Waits for the counts and says where this rank's routes go: whether as sums, the tally, the sent tokens."""
        records, (num_tokens, top_k) = self.group.pool.records, self._experts.shape
        bytes_each = record_bytes(top_k)
        sent_tokens = self._experts.new_empty(num_tokens * min(top_k, self.peers.size))
        routes = dict(
            experts=self._experts.data_ptr(),
            weights=self._weights.data_ptr(),
            block_counts=self._block_counts.data_ptr(),
            bases=self._bases.data_ptr(),
            sent_tokens=sent_tokens.data_ptr(),
            choice_slots=self._choice_slots.data_ptr(),
            token_slots=self._token_slots.data_ptr(),
            slots=self._slots.data_ptr(),
        )
        sums, is_placed, tally = self._wait_and_place(routes, records.capacity_bytes // bytes_each)
        if not is_placed:
            most = tally.most_received * bytes_each
            records.reserve(most, 2 * most)
            self.group.op.place(self.exchange, records.native, self._stream, returns_sums=sums, **routes)
        return sums, tally, sent_tokens

    def _wait_and_place(self, routes: dict[str, int], most_records: int) -> tuple[bool, bool, Tally]:
        """Whether rows return as sums, whether so many records had room and were sent, and what the counts say."""
        pool, limit_s = self.group.pool, self.peers.timeout_s - WATCHDOG_MARGIN_S
        found = self.group.op.wait_and_place(
            self.exchange,
            pool.records.native,
            self._stream,
            **{name: pool.mailbox[name] for name in ("host_counts", "host_ready", "host_failure")},
            ready_before=self._ready_before,
            limit_s=limit_s,
            sums={"rows": 0, "sums": 1, "auto": -1}[self.config.combine],
            sums_below=SUMS_BELOW,
            most_records=most_records,
            **routes,
        )
        if found is None:
            raise peer_error(self.peers, "layout", f"nothing came within {limit_s:.0f} s")
        check_failure(pool.host_failure, self.peers)
        sums, is_placed, tally = found
        return bool(sums), is_placed, Tally(*tally)

    def _received(self, tally: Tally, schedules: list[Schedule]) -> list[torch.Tensor]:
        """Where the routes that come here go, choice_rows, row_sources and row_weights, padded; fills the schedules."""
        op, natives = self.group.op, [schedule.native for schedule in schedules]
        counts = (tally.num_received * self._experts.shape[1], tally.num_rows, tally.num_rows)
        sizes = [-(-count // 4) * 4 for count in counts]
        size = self.peers.size
        sizes.append(op.place_lists(natives, 0, tally.num_rows, size, self._num_experts // size))
        *routes, lists = self._experts.new_empty(sum(sizes)).split_with_sizes(sizes)
        choice_rows, row_sources, row_weights = routes
        op.schedule_and_receive(
            self.exchange,
            self.group.pool.records.native,
            natives,
            lists.data_ptr(),
            self._stream,
            num_received=tally.num_received,
            choice_rows=choice_rows.data_ptr(),
            row_sources=row_sources.data_ptr(),
            row_weights=row_weights.data_ptr(),
            row_offsets=self._row_offsets.data_ptr(),
        )
        for schedule in schedules:
            schedule.words = lists
        return routes


def exchange_of(group: Group, peers: Peers, counts: torch.Tensor, num_experts: int, num_tokens: int, top_k: int):
    """What all stages of a forward and its backward share, as the operator takes it.

    Args:
        counts: [W, E + W + 1] int32 on the device; the operator remembers where they lie.
    """
    return group.op.Exchange(
        counts=counts.data_ptr(),
        counts_stride=num_experts + peers.size + 1,
        num_ranks=peers.size,
        rank=peers.rank,
        num_experts=num_experts,
        num_choices=top_k,
        num_tokens=num_tokens,
        claimed_items=group.pool.claimed_items.data_ptr(),
        num_sms=group.num_sms,
        failure=group.pool.failure.data_ptr(),
        limit_ns=int(peers.timeout_s * NS),
    )


def choose_returns(
    config: TileOverlapConfig, tally: Tally, row_bytes: int, segment_bytes: int = SEGMENT_BYTES
) -> Returns:
    """How rows come home: from the exchanged counts, so that all ranks choose alike; as the operator chooses."""
    fewer = tally.remote_sends < SUMS_BELOW * tally.remote_routes
    return returns_of(config, fewer if config.combine == "auto" else config.combine == "sums", row_bytes, segment_bytes)


def returns_of(config: TileOverlapConfig, sums: bool, row_bytes: int, segment_bytes: int) -> Returns:
    """How rows of ``row_bytes`` come home by the options, given whether as sums and the bytes of a transfer."""
    bands = config.bands_per_segment
    if bands == "auto":
        bands = max(1, segment_bytes // (BAND * row_bytes))
    return Returns(sums, config.owner_alignment == "tile", bands, num_panels=2 if sums else 1)


def rows_to_receive(plan: Plan) -> tuple[int, int]:
    """The most rows that any rank of the group receives now, and that it could from as many tokens."""
    tally = plan.tally
    return tally.most_sent_away if plan.returns.sums else tally.most_routed_away, tally.most_routed
