"""Stage 2, layout: where every row goes. Ranks exchange counts once; all positions are computed on the device.

Letters: T tokens of this rank, k = top_k, W ranks, E experts, E_local = E / W experts of a rank.
A token travels once to every rank that holds any of its experts: S rows sent, U rows received.
R expert rows: one for each (received row, choice) pair of this rank's experts, grouped by expert and within it by the
token's owner: the next ranks first, this rank last, because what has to travel should be computed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from .exchange import HostCopy, Peers, all_gather_counts, all_to_all_rows
from .placement import count_routes, place_rows, place_tokens
from .route import Routes

if TYPE_CHECKING:
    from .schedule import Returns


# What a rank tells the others in the last word of its counts, one bit each.
CANNOT_OVERLAP, RUNS_MODULES = 1, 2


class Tally(NamedTuple):
    """What the host has to know of the exchanged counts; "away" leaves out what stays on its rank.

    Attributes:
        all_can_overlap: whether every rank of the group said so; the same answer on each of them.
        num_rows, num_sent, num_received: R, S, U.
        own_sent, own_received, own_rows: the first sent and the first received row of those that go from this rank to
            itself, and how many.
        remote_routes, remote_sends: of the whole group, what goes away.
        most_received, most_arriving: rows that any rank receives, and without its own.
        most_sent_away, most_routed_away, most_routed: of any rank, rows and routes.
        expert_counts: rows of each local expert.
    """

    all_can_overlap: bool
    num_rows: int
    num_sent: int
    num_received: int
    own_sent: int
    own_received: int
    own_rows: int
    remote_routes: int
    remote_sends: int
    most_received: int
    most_arriving: int
    most_sent_away: int
    most_routed_away: int
    most_routed: int
    expert_counts: list[int]


@dataclass(frozen=True)
class Plan:
    """Everything the later stages and the backward pass need to know about one forward's routing.

    Attributes:
        peers: the expert-parallel group.
        counts: [W, E + W + 1] int32 on the host; row r holds rank r's routes to each expert, its rows for each rank,
            and :data:`CANNOT_OVERLAP` and :data:`RUNS_MODULES`, where they hold for its experts.
        device_counts: the same on the device.
        sent_tokens: [S] int32, the token in each sent row.
        choice_slots: [T, k] int32, the sent row that carries a choice, -1 for a dropped route.
        token_slots: [T, k] int32, ``choice_slots`` with every sent row named once a token and -1 elsewhere.
        choice_rows: [U, k] int32, the expert row of a received row's choice, -1 where the choice is not ours.
        row_sources: [R] int32, the received row that each expert row is a copy of.
        row_weights: [R] float32, the router weight of each expert row.
        row_offsets: [E_local + 1] int32, where each local expert's rows start.
        slots: [T, k] int32, where each choice's result is summed from if ranks write into each other's memory, see
            :mod:`ds_tileoverlap.schedule`.
        returns: how rows then come home.
        overlaps: whether this forward overlaps: all ranks can, and no profile predicts a loss.
    """

    NUM_TENSORS: ClassVar[int]

    peers: Peers
    counts: torch.Tensor
    device_counts: torch.Tensor
    sent_tokens: torch.Tensor
    choice_slots: torch.Tensor
    token_slots: torch.Tensor
    choice_rows: torch.Tensor
    row_sources: torch.Tensor
    row_weights: torch.Tensor
    row_offsets: torch.Tensor
    slots: torch.Tensor | None = None
    returns: Returns | None = None
    overlaps: bool = False

    @property
    def top_k(self) -> int:
        return self.choice_slots.shape[1]

    @property
    def num_experts(self) -> int:
        return self.counts.shape[1] - self.peers.size - 1

    @cached_property
    def routes(self) -> np.ndarray:
        """[W, W, E_local] int32: how many routes go from a rank to each expert of a rank."""
        size = self.peers.size
        return self.counts.numpy()[:, : self.num_experts].reshape(size, size, self.num_experts // size)

    @cached_property
    def sends(self) -> np.ndarray:
        """[W, W] int32: rows that go from a rank to a rank, one for each token that has an expert there."""
        return self.counts.numpy()[:, self.num_experts : -1]

    @cached_property
    def tally(self) -> Tally:
        """What the host has to know of the counts; the operator finds it at once."""
        routed, sent, rank = self.routes_between, self.sends_between, self.peers.rank
        away, sent_away = _without_diagonal(routed), _without_diagonal(sent)
        local = self.num_experts // self.peers.size
        first = rank * local
        return Tally(
            all_can_overlap=not any(row[-1] for row in self._table),
            num_rows=sum(row[rank] for row in routed),
            num_sent=sum(sent[rank]),
            num_received=sum(row[rank] for row in sent),
            own_sent=sum(sent[rank][:rank]),
            own_received=sum(row[rank] for row in sent[:rank]),
            own_rows=sent[rank][rank],
            remote_routes=sum(map(sum, away)),
            remote_sends=sum(map(sum, sent_away)),
            most_received=max(map(sum, zip(*sent))),
            most_arriving=max(map(sum, zip(*sent_away))),
            most_sent_away=max(map(sum, sent_away)),
            most_routed_away=max(map(sum, away)),
            most_routed=max(map(sum, routed)),
            expert_counts=list(map(sum, zip(*(row[first : first + local] for row in self._table)))),
        )

    # Lists from here on: for so few numbers every call of numpy costs more than Python.
    @cached_property
    def _table(self) -> list[list[int]]:
        return self.counts.tolist()

    @cached_property
    def routes_between(self) -> list[list[int]]:
        """[W][W], how many routes go from a rank to a rank."""
        local = self.num_experts // self.peers.size
        firsts = range(0, self.num_experts, local)
        return [[sum(row[first : first + local]) for first in firsts] for row in self._table]

    @property
    def remote_routes(self) -> list[list[int]]:
        """[W][W] as :attr:`routes_between`, 0 where they stay on their rank."""
        return _without_diagonal(self.routes_between)

    @cached_property
    def sends_between(self) -> list[list[int]]:
        """[W][W], :attr:`sends` as lists."""
        first = self.num_experts
        return [row[first:-1] for row in self._table]

    @property
    def remote_sends(self) -> list[list[int]]:
        """[W][W] as :attr:`sends`, 0 where they stay on their rank."""
        return _without_diagonal(self.sends_between)

    @cached_property
    def send_splits(self) -> list[int]:
        """Rows sent to each rank."""
        return self.sends_between[self.peers.rank]

    @cached_property
    def recv_splits(self) -> list[int]:
        """Rows received from each rank."""
        return [row[self.peers.rank] for row in self.sends_between]

    @property
    def first_that_cannot_overlap(self) -> int:
        """The lowest place in the group of a rank that cannot; it says why."""
        return int(self.counts.numpy()[:, -1].astype(bool).argmax())

    @property
    def runs_modules(self) -> bool:
        """Whether any rank's experts run module by module, whose backward exchanges rows and scalars one by one."""
        return any(row[-1] & RUNS_MODULES for row in self._table)

    @property
    def num_rows(self) -> int:
        """R."""
        return self.tally.num_rows

    @property
    def expert_counts(self) -> list[int]:
        """Rows of each local expert."""
        return self.tally.expert_counts

    @cached_property
    def expert_starts(self) -> list[int]:
        """Where each local expert's rows start, then R; ``row_offsets`` on the host."""
        return list(accumulate(self.expert_counts, initial=0))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor fields. Autograd functions save these, so that checkpointing frees and recomputes them too."""
        return tuple(getattr(self, name) for name in _TENSOR_FIELDS)

    def but(self, **fields: object) -> Plan:
        """The same with other fields, apart from the counts: what has been derived from them stays known."""
        changed = object.__new__(Plan)
        vars(changed).update(vars(self), **fields)
        return changed

    def without_tensors(self) -> Plan:
        return self.but(**dict.fromkeys(_TENSOR_FIELDS))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Plan:
        return self.but(**dict(zip(_TENSOR_FIELDS, tensors)))


def _without_diagonal(table: list[list[int]]) -> list[list[int]]:
    return [[*row[:i], 0, *row[i + 1 :]] for i, row in enumerate(table)]


_TENSOR_FIELDS = tuple(field.name for field in fields(Plan) if field.name not in ("peers", "returns", "overlaps"))
Plan.NUM_TENSORS = len(_TENSOR_FIELDS)


def layout(
    routes: Routes,
    num_experts: int,
    peers: Peers,
    meanwhile: Callable[[], None] = lambda: None,
    runs_modules: bool = False,
) -> Plan:
    """Builds the :class:`Plan` of one forward; the only place where the host waits for the device.

    Args:
        routes: the router's choices for this rank's T tokens.
        num_experts: E, over all ranks.
        peers: the expert-parallel group.
        meanwhile: queues more work before the host waits.
        runs_modules: whether this rank's experts run module by module; the others learn of it with the counts.

    Raises:
        PeerError: a rank did not take part in the exchange of counts or routes.
    """
    counted = count_routes(routes.experts, num_experts, peers.size)
    if runs_modules:
        counted.counts[-1] = RUNS_MODULES
    device_counts = all_gather_counts(counted.counts, peers)
    host_counts = HostCopy(device_counts, peers)
    # Queued before the host waits: the device has work while the counts travel.
    sent_tokens, choice_slots, token_slots, sent_routes = place_tokens(
        routes.experts, routes.weights, counted, peers.size
    )
    meanwhile()
    plan = Plan(peers, host_counts.wait(), device_counts, None, choice_slots, token_slots, *[None] * 4)
    num_sent = sum(plan.send_splits)
    received = all_to_all_rows(sent_routes[:num_sent], plan.send_splits, plan.recv_splits, peers, "layout")
    choice_rows, row_sources, row_weights, row_offsets = place_rows(
        received, num_experts // peers.size, plan.num_rows, sum(plan.recv_splits[: peers.rank + 1])
    )
    return plan.but(
        sent_tokens=sent_tokens[:num_sent],
        choice_rows=choice_rows,
        row_sources=row_sources,
        row_weights=row_weights,
        row_offsets=row_offsets,
    )
