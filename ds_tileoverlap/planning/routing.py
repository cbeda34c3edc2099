"""Which rank gets which rows, drawn from a seeded generator: the same counts that ranks exchange in the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..exchange import Peers
from ..layout import Plan

# So many ranks choose for each of their tokens; the counts of further ranks are drawn from what these chose.
RANKS_WITH_TOKENS = 8


@dataclass(frozen=True)
class Shape:
    """One MoE layer of gated experts. ``tokens`` are those of a rank."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int

    @property
    def row_bytes(self) -> int:
        """Of one hidden row of 16-bit values."""
        return 2 * self.hidden


@dataclass(frozen=True)
class Unevenness:
    """How scores, uniform over 0 to 1, differ between experts; as in ``bench/stages.py``.

    Attributes:
        skew: added to the scores of rank 0's experts.
        spread: added to those of each rank's last expert and taken from those of its first, linear between them.
    """

    skew: float = 0.0
    spread: float = 0.0


def draw(shape: Shape, num_ranks: int, uneven: Unevenness, seed: int) -> Plan:
    """The Plan of the fullest rank, without its tensors: what follows from the counts is there.

    With more than :data:`RANKS_WITH_TOKENS` ranks a rank's choices only add up to tokens x k on average.
    """
    generator = np.random.default_rng(seed)
    drawn = [_choices(shape, num_ranks, uneven, generator) for _ in range(min(num_ranks, RANKS_WITH_TOKENS))]
    routes, sends = (np.stack(counts) for counts in zip(*drawn))
    if others := num_ranks - len(drawn):
        routes = np.concatenate([routes, _like(routes, others, shape.tokens, generator)])
        sends = np.concatenate([sends, _like(sends, others, shape.tokens, generator)])
    return _plan(routes, sends)


def balanced(shape: Shape, num_ranks: int) -> Plan:
    """As :func:`draw` where all experts get alike, and tokens choose without regard to ranks; nothing is drawn.

    Two choices of each of 12 tokens among four experts on two ranks are 6 routes to each expert and 10 rows to each
    rank: a sixth of the pairs of experts lies on the other one.
    """
    num_local = shape.experts // num_ranks
    each = np.diff(np.arange(shape.experts + 1) * shape.tokens * shape.top_k // shape.experts)
    missing = math.comb(shape.experts - num_local, shape.top_k) / math.comb(shape.experts, shape.top_k)
    reached = round(shape.tokens * (1 - missing))
    return _plan(np.tile(each, (num_ranks, 1)), np.full((num_ranks, num_ranks), reached))


def _plan(routes: np.ndarray, sends: np.ndarray) -> Plan:
    """Args: routes [W, ..] to all experts in their order, sends [W, W]."""
    size, can_overlap = len(routes), np.zeros((len(routes), 1), dtype=int)
    counts = torch.from_numpy(np.concatenate([routes.reshape(size, -1), sends, can_overlap], 1).astype(np.int32))
    fullest = int(routes.reshape(size, size, -1).sum((0, 2)).argmax())
    peers = Peers(None, fullest, tuple(range(size)), 0.0, "plan")
    return Plan(peers, counts, None, *[None] * 7)


def _choices(
    shape: Shape, num_ranks: int, uneven: Unevenness, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """One rank's routes to each expert [W, E_local], and the tokens that it sends to each rank [W]."""
    num_local = shape.experts // num_ranks
    scores = generator.random((shape.tokens, shape.experts), dtype=np.float32)
    scores += np.tile(np.linspace(-uneven.spread, uneven.spread, num_local, dtype=np.float32), num_ranks)
    scores[:, :num_local] += uneven.skew
    chosen = np.argpartition(scores, -shape.top_k, axis=1)[:, -shape.top_k :]
    reached = np.zeros((shape.tokens, num_ranks), dtype=bool)
    np.put_along_axis(reached, chosen // num_local, True, axis=1)
    return np.bincount(chosen.ravel(), minlength=shape.experts).reshape(num_ranks, num_local), reached.sum(0)


def _like(drawn: np.ndarray, count: int, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Counts [count, W, ..] of further ranks with the shares of the drawn ones; all ranks but 0 are chosen alike."""
    share = drawn.mean(0) / tokens
    share[1:] = share[1:].mean(0)
    return generator.binomial(tokens, share, size=(count, *share.shape))
