"""Stage 2, layout, where ranks write into each other's memory: no collective, and one wait of the host for the counts.

The same :class:`~ds_tileoverlap.layout.Plan` as ``layout.layout`` makes; positions are computed by ``csrc/layout.cu``.
Between the two halves of the stage the host prepares the next ones: once the counts are there, the device waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import TileOverlapConfig
from .exchange import WATCHDOG_MARGIN_S, Peers, peer_error
from .kernels import raw_stream
from .layout import Plan
from .overlap_group import NS, Group, check_failure
from .route import Routes
from .schedule import BAND, Returns

if TYPE_CHECKING:
    from .planning.choices import Choices

SEGMENT_BYTES = 2**21
# Sums return where they are so many times fewer than rows: adding up costs memory traffic, and starts later.
SUMS_BELOW = 0.6


@dataclass(frozen=True)
class Choice:
    """What ``auto`` means for a layer and a number of tokens; without a profile, the same for all.

    Attributes:
        sums_below: how many times fewer than rows sums must be to return.
        segment_bytes: of one transfer of rows.
        why_sequential: why overlap would be slower than the sequential backend; ``None`` where it would not.
    """

    sums_below: float = SUMS_BELOW
    segment_bytes: int = SEGMENT_BYTES
    why_sequential: str | None = None


USUAL = Choice()


class Counting:
    """The stage, begun: the counts are on their way, and the host can prepare what does not depend on them.

    Args:
        routes: the router's choices for this rank's T tokens.
        num_experts: E, over all ranks.
        peers: the expert-parallel group.
        row_bytes: of one hidden row.
        can_overlap: whether this rank can run the overlap backend now; the others learn of it with the counts.
        choices: of the layer, where a profile decides.

    Attributes:
        plan: what :meth:`finish` returned.
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
    ):
        op, pool, size, experts = group.op, group.pool, peers.size, routes.experts
        self.plan: Plan | None = None
        self._experts, self._weights = experts, routes.weights.detach().contiguous()
        self.peers, self.group, self.config, self.row_bytes = peers, group, config, row_bytes
        self._choices = choices
        num_tokens, top_k = experts.shape
        keys, num_blocks = num_experts + size, -(-num_tokens // op.BLOCK_TOKENS)
        sizes = [num_blocks * keys, size * (keys + 1), 2 * keys + 1]
        self._block_counts, counts, self._bases = experts.new_empty(sum(sizes)).split_with_sizes(sizes)
        self._counts = counts.view(size, keys + 1)
        # What is the same for all kernels of the stage.
        self._common = dict(
            num_choices=top_k,
            num_experts=num_experts,
            num_ranks=size,
            rank=peers.rank,
            limit_ns=int(peers.timeout_s * NS),
            stream=raw_stream(experts),
        )
        self._ready_before = int(pool.host_ready) & 0xFFFFFFFF
        op.count(
            experts=experts.data_ptr(),
            num_tokens=num_tokens,
            word=int(not can_overlap),
            block_counts=self._block_counts.data_ptr(),
            peer_counts=pool.peer_counts.data_ptr(),
            stride=pool.counts_stride,
            peer_ready=pool.peer_ready.data_ptr(),
            ready=pool.ready.data_ptr(),
            epoch=pool.records.epoch.data_ptr(),
            targets=pool.records.targets.data_ptr(),
            counts=counts.data_ptr(),
            bases=self._bases.data_ptr(),
            host_counts=pool.host_counts.data_ptr(),
            host_failure=pool.host_failure.data_ptr(),
            host_ready=pool.host_ready.data_ptr(),
            failure=pool.failure.data_ptr(),
            **self._common,
        )
        self._choice_slots, self._token_slots, self._slots = experts.new_empty(3, num_tokens, top_k)
        self._row_offsets = experts.new_empty(num_experts // size + 1)

    def finish(self) -> Plan:
        """Waits for the counts of all ranks and queues the rest; the Plan also says how rows return.

        Raises:
            PeerError: the counts of a rank did not come.
        """
        self._wait()
        peers, records, op = self.peers, self.group.pool.records, self.group.op
        host_counts = self.group.pool.host_counts[: self._counts.numel()].clone().view(self._counts.shape)
        experts, weights, (num_tokens, top_k) = self._experts, self._weights, self._experts.shape
        plan = Plan(peers, host_counts, self._counts, *[None] * 7)
        decides = self._choices is not None and plan.all_can_overlap
        choice = self._choices.of(max(map(sum, plan.routes_between))) if decides else USUAL
        returns = choose_returns(self.config, plan, self.row_bytes, choice)
        num_received = sum(plan.recv_splits)
        sent_tokens = experts.new_empty(sum(plan.send_splits))
        most = max(map(sum, zip(*plan.sends_between))) * -(-2 * top_k // 4) * 16
        records.reserve(most, 2 * most)
        op.place(
            experts=experts.data_ptr(),
            weights=weights.data_ptr(),
            block_counts=self._block_counts.data_ptr(),
            bases=self._bases.data_ptr(),
            num_tokens=num_tokens,
            returns_sums=returns.sums,
            sent_tokens=sent_tokens.data_ptr(),
            choice_slots=self._choice_slots.data_ptr(),
            token_slots=self._token_slots.data_ptr(),
            slots=self._slots.data_ptr(),
            **self._common,
            **records.sending,
        )
        choice_rows, row_sources = experts.new_empty(num_received, top_k), experts.new_empty(plan.num_rows)
        row_weights = weights.new_empty(plan.num_rows)
        op.receive(
            num_received=num_received,
            counts=self._counts.data_ptr(),
            choice_rows=choice_rows.data_ptr(),
            row_sources=row_sources.data_ptr(),
            row_weights=row_weights.data_ptr(),
            row_offsets=self._row_offsets.data_ptr(),
            **self._common,
            **records.receiving,
        )
        self.plan = plan.but(
            sent_tokens=sent_tokens,
            choice_slots=self._choice_slots,
            token_slots=self._token_slots,
            choice_rows=choice_rows,
            row_sources=row_sources,
            row_weights=row_weights,
            row_offsets=self._row_offsets,
            returns=returns,
            overlaps=plan.all_can_overlap and choice.why_sequential is None,
            slots=self._slots,
        )
        return self.plan

    def _wait(self) -> None:
        pool, limit_s = self.group.pool, self.peers.timeout_s - WATCHDOG_MARGIN_S
        word = pool.host_ready.data_ptr()
        if not self.group.op.wait_for_change(word=word, old_value=self._ready_before, limit_s=limit_s):
            raise peer_error(self.peers, "layout", f"nothing came within {limit_s:.0f} s")
        check_failure(pool.host_failure, self.peers)


def choose_returns(config: TileOverlapConfig, plan: Plan, row_bytes: int, choice: Choice = USUAL) -> Returns:
    """How rows come home: from the exchanged counts, so that all ranks choose alike."""
    num_routes, num_sends = sum(map(sum, plan.remote_routes)), sum(map(sum, plan.remote_sends))
    sums = num_sends < choice.sums_below * num_routes if config.combine == "auto" else config.combine == "sums"
    bands = config.bands_per_segment
    if bands == "auto":
        bands = max(1, choice.segment_bytes // (BAND * row_bytes))
    return Returns(sums, config.owner_alignment == "tile", bands, num_panels=2 if sums else 1)


def rows_to_receive(plan: Plan) -> tuple[int, int]:
    """The most rows that any rank of the group receives now, and that it could from as many tokens."""
    remote = plan.remote_sends if plan.returns.sums else plan.remote_routes
    return max(map(sum, remote)), max(map(sum, plan.routes_between))
