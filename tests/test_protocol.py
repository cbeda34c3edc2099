"""The protocol of the overlapped return as a state machine, explored in full: two ranks, three bands, two halves.

Roles and words, as in ``csrc``: a rank begins a use (epoch + 1, target + what must come), its GEMM writes bands and
publishes them with the epoch, a courier waits for a band and for the half of the peer's buffer, writes the band there
and announces it; the sum waits for the announced total, reads, and tells the peer that it has read (consumed). The
next use begins after the sum. Every step of both ranks may come at any time.

``broken`` takes one guard away: the exploration must then find a fault, or it could not have found one.
"""

from typing import NamedTuple

import pytest

BANDS, HALVES = 3, 2
# Words wrap here: every exploration runs over the end.
WORD = 16


def reached(seen, expected):
    return (seen - expected) % WORD < WORD // 2


class Rank(NamedTuple):
    uses: int = 0  # uses begun
    stage: str = "begin"  # begin, run, sum, done, failed
    epoch: int = WORD - 2
    target: int = WORD - 3
    written: int = 0  # bands that the GEMM has written in this use
    published: int = 0
    sent: int = 0  # bands that the courier has written to the peer
    announced: int = 0
    read: int = 0  # bands that the sum has read
    result: tuple = (None,) * BANDS  # what lies in the GEMM's result: the use that wrote it
    signals: tuple = (WORD - 2,) * BANDS
    arrived: int = WORD - 3  # written by the peer
    consumed: int = WORD - 2  # written by the peer
    received: tuple = ((None,) * BANDS,) * HALVES
    is_dead: bool = False


class Fault(AssertionError):
    pass


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def steps(me, peer, sends, gets, broken):
    """Every (me, peer) after one step of ``me``; ``sends``, ``gets``: bands to and from the peer in each use."""
    if me.is_dead or me.stage in ("done", "failed"):
        return
    if me.stage == "begin":
        if me.uses == len(sends):
            yield me._replace(stage="done"), peer
            return
        epoch, target = (me.epoch + 1) % WORD, (me.target + gets[me.uses]) % WORD
        fresh = dict(written=0, published=0, sent=0, announced=0, read=0)
        if "epoch" in broken:  # signals that are set once and never stamped
            epoch = me.epoch
        yield me._replace(uses=me.uses + 1, stage="run", epoch=epoch, target=target, **fresh), peer
        return
    use, half = me.uses, me.uses % HALVES
    if me.stage == "run":
        may_publish = me.published < (BANDS if "release" in broken else me.written)
        if me.written < BANDS:
            yield me._replace(result=put(me.result, me.written, use), written=me.written + 1), peer
        if may_publish:
            signals = put(me.signals, me.published, me.epoch)
            yield me._replace(signals=signals, published=me.published + 1), peer
        band = me.sent
        if band < sends[use - 1]:
            is_ready = "acquire" in broken or reached(me.signals[band], me.epoch)
            is_free = "consumed" in broken or reached(me.consumed, me.epoch - HALVES)
            if is_ready and is_free:
                received = put(peer.received, half, put(peer.received[half], band, me.result[band]))
                yield me._replace(sent=band + 1), peer._replace(received=received)
        may_announce = me.announced < (sends[use - 1] if "announce" in broken else me.sent)
        if may_announce:
            yield me._replace(announced=me.announced + 1), peer._replace(arrived=(peer.arrived + 1) % WORD)
        if me.published == BANDS and me.sent == me.announced == sends[use - 1]:
            yield me._replace(stage="sum"), peer
    elif me.stage == "sum" and ("arrived" in broken or reached(me.arrived, me.target)):
        if me.read < gets[use - 1]:
            if me.received[half][me.read] != use:
                raise Fault(f"use {use} read band {me.read} of use {me.received[half][me.read]}")
            yield me._replace(read=me.read + 1), peer
        else:
            # The peer's writes to this half have come: it may be told, and the next use may begin.
            yield me._replace(stage="begin"), peer._replace(consumed=me.epoch)


def waits_for(me, sends):
    """What a rank that can do nothing waits for; its deadline then ends the wait and names this."""
    if me.stage == "sum":
        return "rows arrived"
    if me.stage == "run" and me.sent < sends[me.uses - 1]:
        return "peer consumed" if reached(me.signals[me.sent], me.epoch) else "tile ready"
    return None


def explore(sends, broken=(), may_die=False):
    """Visits every state. Returns what deadlines were for, and how many states there are.

    Args:
        sends: for each rank the bands that it sends to the other in each use.
        may_die: whether rank 1 may stop for ever at any moment.
    """
    start = (Rank(), Rank())
    seen, todo, deadlines = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = []
        for rank in (0, 1):
            for me, peer in steps(state[rank], state[1 - rank], sends[rank], sends[1 - rank], broken):
                following.append((me, peer) if rank == 0 else (peer, me))
        if may_die and not state[1].is_dead and state[1].stage != "done":
            following.append((state[0], state[1]._replace(is_dead=True)))
        moved = any(next(steps(state[r], state[1 - r], sends[r], sends[1 - r], broken), None) for r in (0, 1))
        if not moved:
            for rank in (0, 1):
                me = state[rank]
                if me.is_dead or me.stage in ("done", "failed"):
                    continue
                reason = waits_for(me, sends[rank])
                if reason is None or not state[1 - rank].is_dead:
                    raise Fault(f"rank {rank} is stuck at {me} beside {state[1 - rank]}")
                deadlines.add(reason)
                failed = me._replace(stage="failed")
                following.append((failed, state[1]) if rank == 0 else (state[0], failed))
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    assert any(all(rank.stage in ("done", "failed") or rank.is_dead for rank in state) for state in seen)
    return deadlines, len(seen)


# Bands from rank 0 and from rank 1 in four uses. Where nothing comes back, a rank may run ahead of the other.
TRAFFIC = {
    "even": ([3, 3, 3, 3], [3, 3, 3, 3]),
    "one way": ([3, 3, 3, 3], [0, 0, 0, 0]),
    "changing": ([3, 0, 1, 3], [1, 3, 0, 2]),
}


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_no_lost_signal_no_early_overwrite_no_deadlock(traffic):
    deadlines, states = explore(TRAFFIC[traffic])
    assert not deadlines and states > 1000


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_dead_peer_ends_in_a_deadline_that_says_what_was_awaited(traffic):
    deadlines, _ = explore(TRAFFIC[traffic], may_die=True)
    gets = TRAFFIC[traffic][1]
    assert deadlines == ({"rows arrived"} if any(gets) else set()) | ({"peer consumed"} if 0 in gets else set())


@pytest.mark.parametrize(
    "broken,traffic",
    [
        ("acquire", "even"),  # the courier does not wait for the tile
        ("release", "even"),  # the signal comes before the tile
        ("epoch", "even"),  # an old signal looks like a new one
        ("announce", "even"),  # the count comes before the rows
        ("arrived", "even"),  # the sum does not wait for the rows
        ("consumed", "one way"),  # a half is written before it has been read
    ],
)
def test_every_guard_is_needed(broken, traffic):
    with pytest.raises(Fault, match="read band"):
        explore(TRAFFIC[traffic], broken={broken})
