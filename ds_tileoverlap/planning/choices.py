"""Whether a layer overlaps under ``auto``, decided from the group's profile once for each number of tokens.

It does unless the predicted loss is more than the profile's error can explain (:attr:`~.profile.Profile.margin`), so
that no decision contradicts a measurement; where nothing was measured, for groups of other sizes and options without
records, nothing is predicted.
"""

from __future__ import annotations

from ..config import TileOverlapConfig
from ..exchange import Peers
from ..local_experts import LocalExperts
from ..log import say
from ..overlap_group import Group
from ..symmetric_layout import choose_returns
from .profile import Profile
from .routing import Shape, balanced
from .stages import Work, fused_us, sequential_us, stages_of

# More tokens are simulated as so many: all times grow alike.
MOST_TOKENS = 2**15


class Choices:
    """Those of one layer. All ranks get the same: they follow from the exchanged counts and a shared profile.

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
        self.experts, self.group, self._config, self._peers = experts, group, config, peers
        self._layer = (*experts.down_shape(), num_experts, top_k)
        self._gated, self._options = experts.form.gate is not None, config.model_dump_json()
        self._found: dict[int, str | None] = {}

    def why_sequential(self, most_routes: int) -> str | None:
        """Why the layer does not overlap with so many routes from the rank that has most, to the next power of two."""
        size = (most_routes * 4 // 3).bit_length()
        if size not in self._found:
            self._found[size] = self._first(size)
        return self._found[size]

    def _first(self, size: int) -> str | None:
        top_k = self._layer[-1]
        shape = Shape(*self._layer, tokens=min(max(2**size // (2 * top_k), 1), MOST_TOKENS))
        key, decided = (shape, self._gated, self._options), self.group.decided
        if key not in decided:
            why = decided[key] = why_sequential(shape, self._peers.size, self.group.profile, self._config, self._gated)
            if why and self._peers.rank == 0:
                say(
                    f"MoE layers like '{self._peers.layer}' with about {shape.tokens} tokens a rank are sequential "
                    f"instead of overlap, as {why}",
                    every_rank=True,
                )
        return decided[key]


def why_sequential(
    shape: Shape, num_ranks: int, profile: Profile, config: TileOverlapConfig | None = None, gated: bool = True
) -> str | None:
    """Why overlap would be slower than the sequential backend, on balanced routing; ``None`` where it would not.

    Args:
        gated: whether experts have a gate beside the up projection.
    """
    config = config or TileOverlapConfig()
    has_records = profile.key["ranks"] == num_ranks and profile.link_is_measured
    is_predicted = has_records and config.comm_sms in ("auto", 0) and config.overlap_dispatch
    if config.backend != "auto" or not is_predicted:
        return None
    plan = balanced(shape, num_ranks)
    plan = plan.but(returns=choose_returns(config, plan.tally, shape.row_bytes, profile.segment_bytes))
    found = [Work(stage, plan, shape) for stage in stages_of(shape, plan.returns, gated)]
    found = found if config.overlap_backward else found[:2]
    overlap_us, sequential = (sum(each(work, profile) for work in found) for each in (fused_us, sequential_us))
    if overlap_us <= profile.margin * sequential:
        return None
    return (
        f"profile {profile.name} predicts {overlap_us:.0f} us against {sequential:.0f} us for the stages that exchange"
        f", and its error is at most {profile.error:.0%}"
    )
