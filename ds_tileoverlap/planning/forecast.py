"""The whole answer for one layer: the four stages on both backends, memory, what the code chooses and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..arguments import UsageError
from ..buffer import GENERATIONS, half_bytes, record_bytes, scalar_bytes
from ..config import TileOverlapConfig
from ..layout import Plan
from ..overlap import MAX_TOP_K
from ..symmetric_layout import SUMS_BELOW, choose_returns, rows_to_receive
from .choices import why_sequential
from .profile import Profile
from .routing import Shape, Unevenness, draw
from .stages import Timeline, Work, fused, gemm_us, host_us, link_us, sequential_us, works

# As csrc/schedule.cuh and csrc/courier.cuh: more are sequential.
MAX_EXPERTS, MAX_PEERS = 1024, 128
# What is drawn token by token, and scheduled item by item in Python, in seconds and within a few GiB.
MAX_TOKENS, MAX_ROWS = 2**17, 2**22


@dataclass(frozen=True)
class StageForecast:
    """One stage; all times in microseconds.

    Attributes:
        overlap_us, sequential_us: on the two backends.
        gemm_us: the package's GEMM alone; ``exposed_us`` is what the fused stage takes longer.
        link_us: the bytes of the busier direction at the link's rate.
        small_us: kernels before and after the fused one.
        host_us: what the host needs to launch the fused stage; the stage is not faster.
        roof_us: the larger of GEMM and link; ``efficiency`` is its share of the fused stage.
    """

    name: str
    title: str
    overlap_us: float
    sequential_us: float
    gemm_us: float
    link_us: float
    small_us: float
    exposed_us: float
    host_us: float
    link_bytes: int
    roof_us: float
    efficiency: float


@dataclass(frozen=True)
class Choice:
    """What the code chooses, and why in a line."""

    name: str
    value: str | int
    reason: str


class Forecast:
    """Predictions for the fullest rank of a group.

    Args:
        config: options of the layer.

    Raises:
        UsageError: the layer, or an option, is nothing that can be predicted.
    """

    def __init__(
        self,
        shape: Shape,
        num_ranks: int,
        profile: Profile,
        config: TileOverlapConfig | None = None,
        uneven: Unevenness | None = None,
        seed: int = 0,
    ):
        self.shape, self.num_ranks, self.profile = shape, num_ranks, profile
        self.config, self.uneven, self.seed = config or TileOverlapConfig(), uneven or Unevenness(), seed
        _check(shape, num_ranks, self.config)
        plan = draw(shape, num_ranks, self.uneven, seed)
        if plan.num_rows > MAX_ROWS:
            raise UsageError(f"rows of the fullest rank: got {plan.num_rows}, expected at most {MAX_ROWS}")
        self.why_sequential = why_sequential(shape, num_ranks, profile, self.config)
        returns = choose_returns(self.config, plan.tally, shape.row_bytes, profile.segment_bytes)
        self.plan: Plan = plan.but(returns=returns)
        self.works: list[Work] = list(works(shape, self.plan))

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Of the stages, fused."""
        return [fused(work, self.profile) for work in self.works]

    @cached_property
    def stages(self) -> list[StageForecast]:
        return [self._stage(work, timeline) for work, timeline in zip(self.works, self.timelines)]

    def _stage(self, work: Work, timeline: Timeline) -> StageForecast:
        profile, launches = self.profile, host_us(work, self.profile)
        gemm, link, sequential = gemm_us(work, profile), link_us(work, profile), sequential_us(work, profile)
        starts, ends = timeline.spans["small"]
        fuses = self.config.overlap_backward or "back" not in work.stage.name
        overlap = max(timeline.end, launches) if fuses else sequential
        roof = max(gemm, link)
        return StageForecast(
            name=work.stage.name,
            title=work.stage.title,
            overlap_us=overlap,
            sequential_us=sequential,
            gemm_us=gemm,
            link_us=link,
            small_us=float((ends - starts).sum()),
            exposed_us=overlap - gemm,
            host_us=launches,
            link_bytes=work.link_bytes,
            roof_us=roof,
            efficiency=roof / overlap,
        )

    @property
    def overlap_us(self) -> float:
        return sum(stage.overlap_us for stage in self.stages)

    @property
    def sequential_us(self) -> float:
        return sum(stage.sequential_us for stage in self.stages)

    @cached_property
    def choices(self) -> list[Choice]:
        comm_sms = self.profile.comm_sms if self.config.comm_sms == "auto" else self.config.comm_sms
        where = "have SMs of their own, as was faster here; predicted as if not" if comm_sms else "are spare warps"
        return [self._combine(), self._segments(), Choice("comm_sms", comm_sms, f"couriers of the return {where}")]

    def _combine(self) -> Choice:
        sums, sends, routes = self.plan.returns.sums, self.plan.tally.remote_sends, self.plan.tally.remote_routes
        share = f"{sends} sums instead of {routes} rows would travel in the group, {sends / max(routes, 1):.2f} of them"
        why = "as configured" if self.config.combine != "auto" else f"sums are chosen below {SUMS_BELOW}"
        return Choice("combine", "sums" if sums else "rows", f"{share}; {why}")

    def _segments(self) -> Choice:
        returns, work = self.plan.returns, self.works[1]
        if returns.sums:
            return Choice(
                "panels", returns.num_panels, "sums of a panel of columns leave when its remote tiles are computed"
            )
        largest = int(work.segments[:, 1].max(initial=0)) * self.shape.row_bytes
        return Choice(
            "segments",
            len(work.segments),
            f"of {returns.bands_per_segment} bands, at most {largest / 2**20:.2f} MiB; one band for the first and the "
            "last expert",
        )

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the fullest rank: kept for backward, index arrays, and the receive buffers of the group."""
        shape, plan = self.shape, self.plan
        rows, tokens, top_k = plan.num_rows, shape.tokens, shape.top_k
        sent, received = plan.tally.num_sent, plan.tally.num_received
        kept_rows = 0 if self.config.recompute_dispatch else rows * shape.hidden
        return {
            "kept_for_backward_bytes": 2 * (tokens * shape.hidden + kept_rows + rows * 2 * shape.intermediate),
            "positions_bytes": 4 * (4 * tokens * top_k + received * top_k + 2 * rows + sent),
            "receive_buffers_bytes": GENERATIONS * sum(half_bytes(*channel) for channel in self._channels()),
        }

    def _channels(self) -> list[tuple[int, int]]:
        """(needed, most) bytes of half of each channel, as the stages reserve them."""
        tally, row_bytes, top_k = self.plan.tally, self.shape.row_bytes, self.shape.top_k
        tokens = tally.most_arriving * row_bytes
        records = tally.most_received * record_bytes(top_k)
        scalars = tally.most_sent_away * scalar_bytes(top_k)
        needed, most = (rows * row_bytes for rows in rows_to_receive(self.plan))
        return [(records, 2 * records), (tokens, 2 * tokens), (needed, most), (scalars, 2 * scalars)]

    @property
    def verdict(self) -> str:
        ratio = self.sequential_us / self.overlap_us
        times = f"{self.overlap_us:.0f} us against {self.sequential_us:.0f} us of the sequential backend, {ratio:.2f}x"
        if self.refusal:
            return f"overlap does not run: {self.refusal}; if it did: {times}"
        if abs(ratio - 1) <= self.profile.error:
            return f"too near to call: {times}"
        return f"overlap pays: {times}" if ratio > 1 else f"overlap does not pay: {times}"

    @property
    def refusal(self) -> str | None:
        """Why the layer would be sequential whatever the times, as far as it can be known here."""
        if self.config.backend in ("sequential", "reference"):
            return f"the ds_config says backend {self.config.backend!r}"
        if self.num_ranks > MAX_PEERS:
            return f"the group has {self.num_ranks} ranks, more than {MAX_PEERS}"
        return None

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        profile, source = self.profile, self.profile.source
        notes = [
            f"rates: {profile.name}, from {len(source['records'])} records of {source['ranks']} {source['device']}, "
            f"torch {source['torch']}, NCCL {source['nccl']}, {source['date']}; these are predicted to within "
            f"{profile.worst_error:.0%}, others to within {profile.left_out_error:.0%}",
            "counted are the four stages in which an exchange meets a GEMM; layout, activations in backward, weight "
            "gradients and autograd come on top",
            "the overlap backend runs within one machine today, on Hopper GPUs with peer access; elsewhere layers are "
            "sequential",
        ]
        if not profile.link_is_measured:
            notes.append(
                f"the link of {profile.link_gbs:g} GB/s and {profile.link_us:g} us more latency is not measured: its "
                f"rates are scaled from {profile.measured_gbs:g} GB/s, and never above that"
            )
        if self.why_sequential:
            notes.append(f"backend 'auto' would run this layer sequentially, as {self.why_sequential}")
        if self.num_ranks != source["ranks"]:
            notes.append(f"no record has {self.num_ranks} ranks: peers are taken to do what this rank does, in step")
        if not self.config.overlap_backward:
            notes.append("the ds_config says overlap_backward false: both backward stages are sequential")
        if any(stage.host_us >= stage.overlap_us for stage in self.stages):
            notes.append("some stages are bound by the host's launches, as fast as those of the records' host")
        return notes


def _check(shape: Shape, num_ranks: int, config: TileOverlapConfig) -> None:
    """Raises a :class:`UsageError` with all faults."""
    faults = [f"{name}: got {value}, expected at least 1" for name, value in vars(shape).items() if value < 1]
    faults += [
        f"{name}: got {getattr(shape, name)}, expected a multiple of 8"
        for name in ("hidden", "intermediate")
        if getattr(shape, name) % 8
    ]
    if num_ranks < 2 or shape.experts % num_ranks:
        faults.append(f"ranks: got {num_ranks}, expected at least 2 and a divisor of the {shape.experts} experts")
    most = {"experts": MAX_EXPERTS, "top_k": min(MAX_TOP_K, shape.experts), "tokens": MAX_TOKENS}
    faults += [
        f"{name}: got {getattr(shape, name)}, expected at most {limit}"
        for name, limit in most.items()
        if getattr(shape, name) > limit
    ]
    if config.comm_sms not in ("auto", 0):
        faults.append(
            f"comm_sms: got {config.comm_sms}, expected 'auto' or 0: no record gives couriers SMs of their own"
        )
    if not config.overlap_dispatch:
        faults.append("overlap_dispatch: got false, expected true: no record has couriers without a GEMM beside them")
    if faults:
        raise UsageError("; ".join(faults))
