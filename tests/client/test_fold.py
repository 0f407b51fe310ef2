"""Which facts are news, where an epoch begins with every start of an allocator."""

from fact_support import Writer

from topoalign.client.fold import Counts, Fold
from topoalign.core.ids import NodeName

NODE = NodeName("node-1")


def held(fold: Fold) -> list[str]:
    return [device for snapshot in fold.snapshots() for a in snapshot.allocations for device in sorted(a.device_ids)]


def test_an_epoch_that_is_over_is_not_believed_when_it_comes_again() -> None:
    """A stream that went back, or an outbox that repeats itself late, brings old snapshots after newer facts."""
    fold = Fold(Counts())
    former, present = Writer(epoch=1), Writer(epoch=2)
    old = former.snapshot()
    news = [fold.apply(fact) for fact in (old, present.snapshot(), present.grant("a", "GPU-0"))]
    again = fold.apply(old)

    assert ([True] * 3, False) == (news, again)
    assert {NODE: None} == fold.broken, "the node is to be asked how it is"


def test_a_snapshot_that_was_asked_for_is_believed_whatever_its_epoch() -> None:
    """A journal that was lost on a machine whose clock was set back."""
    fold = Fold(Counts())
    former, present = Writer(epoch=2), Writer(epoch=1)
    for fact in (former.snapshot(), former.grant("a", "GPU-0")):
        fold.apply(fact)
    unasked = fold.apply(present.snapshot())
    fold.broken[NODE] = 5.0  # as the client notes when it asks
    asked = fold.apply(present.snapshot())

    assert (False, True) == (unasked, asked)
    assert [] == held(fold)
    assert {} == fold.broken
