"""What ``auto`` becomes for a layer, decided from the group's profile once for each number of tokens.

A decision other than the usual one needs a predicted gain that the profile's error cannot explain
(:attr:`~.profile.Profile.margin`), so that none contradicts a measurement; where nothing was measured, for groups of
other sizes and options without records, the usual one stays.
"""

from __future__ import annotations

from ..config import TileOverlapConfig
from ..exchange import Peers
from ..layout import Plan
from ..local_experts import LocalExperts
from ..log import say
from ..overlap_group import Group
from ..symmetric_layout import Choice, choose_returns
from .profile import Profile
from .routing import Shape, balanced
from .stages import Work, fused_us, sequential_us, stages_of

# More tokens are simulated as so many: all times grow alike.
MOST_TOKENS = 2**15
# Where the threshold between rows and sums lies beside the share that balanced routing gives.
BESIDE = 1.1


class Choices:
    """The choices of one layer. All ranks get the same: they follow from the exchanged counts and a shared profile.

    Args:
        experts: of a known form.
    """

    def __init__(
        self,
        group: Group,
        config: TileOverlapConfig,
        experts: LocalExperts,
        num_experts: int,
        top_k: int,
        peers: Peers,
    ):
        self.experts, self._group, self._config, self._peers = experts, group, config, peers
        self._layer = (*experts.down_shape(), num_experts, top_k)
        self._gated, self._options = experts.form.gate is not None, config.model_dump_json()
        self._found: dict[int, Choice] = {}

    def of(self, most_routes: int) -> Choice:
        """The choice for so many routes from the rank that has most, which all ranks know, to the next power of two."""
        size = (most_routes * 4 // 3).bit_length()
        found = self._found.get(size)
        return self._first(size) if found is None else found

    def _first(self, size: int) -> Choice:
        top_k = self._layer[-1]
        shape = Shape(*self._layer, tokens=min(max(2**size // (2 * top_k), 1), MOST_TOKENS))
        key = shape, self._gated, self._options
        if key not in self._group.decided:
            found = decide(shape, self._peers.size, self._group.profile, self._config, self._gated)
            self._group.decided[key] = found
            if found.why_sequential and self._peers.rank == 0:
                say(
                    f"MoE layers like '{self._peers.layer}' with about {shape.tokens} tokens a rank are sequential "
                    f"instead of overlap, as {found.why_sequential}",
                    every_rank=True,
                )
        found = self._found[size] = self._group.decided[key]
        return found


def decide(
    shape: Shape, num_ranks: int, profile: Profile, config: TileOverlapConfig | None = None, gated: bool = True
) -> Choice:
    """The choice for a layer on balanced routing.

    Args:
        gated: whether experts have a gate beside the up projection.
    """
    config, usual = config or TileOverlapConfig(), Choice(segment_bytes=profile.segment_bytes)
    has_records = profile.key["ranks"] == num_ranks and profile.link_is_measured
    if not has_records or config.comm_sms not in ("auto", 0) or not config.overlap_dispatch:
        return usual
    plan = balanced(shape, num_ranks)

    def predicted(choice: Choice, combine: str | None = None) -> tuple[Plan, list[float], list[float]]:
        """How rows return, and times of the stages on both backends."""
        options = config.model_copy(update={"combine": combine}) if combine else config
        found = plan.but(returns=choose_returns(options, plan, shape.row_bytes, choice))
        works = [Work(stage, found, shape) for stage in stages_of(shape, found.returns, gated)]
        works = works if config.overlap_backward else works[:2]
        return found, *([each(work, profile) for work in works] for each in (fused_us, sequential_us))

    found, overlap_us, sequential = predicted(usual)
    choice = usual
    if config.combine == "auto":
        sums = found.returns.sums
        _, other_us, _ = predicted(usual, combine="rows" if sums else "sums")
        # Rows return in every second stage.
        if sum(overlap_us[1::2]) > profile.margin * sum(other_us[1::2]):
            choice = Choice(_beside(plan, below=sums), profile.segment_bytes)
            overlap_us = other_us
    if config.backend == "auto" and sum(overlap_us) > profile.margin * sum(sequential):
        why = (
            f"profile {profile.name} predicts {sum(overlap_us):.0f} us against {sum(sequential):.0f} us for the stages "
            f"that exchange, and its error is at most {profile.error:.0%}"
        )
        return Choice(choice.sums_below, choice.segment_bytes, why)
    return choice


def _beside(plan: Plan, below: bool) -> float:
    """The threshold by which this routing's rows do not return as sums (below) any more, or do."""
    sends, routes = sum(map(sum, plan.remote_sends)), sum(map(sum, plan.remote_routes))
    share = sends / max(routes, 1)
    return share / BESIDE if below else share * BESIDE
