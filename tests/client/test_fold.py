"""Which facts are news, where an epoch begins with every start of an allocator."""

from fact_support import Writer

from topoalign.client.node_folds import Counts, Fold
from topoalign.core.model.ids import NodeName

NODE = NodeName("node-1")


def to_ask(fold: Fold) -> dict[NodeName, float | None]:
    """The nodes with missing events -> when their allocators were asked last."""
    return {node: believed.asked for node, believed in fold.broken.items()}


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
    assert {NODE: None} == to_ask(fold), "the node is to be asked how it is"


def test_a_confirmed_snapshot_of_a_lower_epoch_is_believed() -> None:
    """A journal that was lost on a machine whose clock was set back."""
    fold = Fold(Counts())
    former, present = Writer(epoch=2), Writer(epoch=1)
    for fact in (former.snapshot(), former.grant("a", "GPU-0")):
        fold.apply(fact)
    unasked = fold.apply(present.snapshot())
    fold.of(NODE).asked, fold.of(NODE).promised = 5.0, 1  # as the client notes when it asks
    asked = fold.apply(present.snapshot())

    assert (False, True) == (unasked, asked)
    assert [] == held(fold)
    assert {} == fold.broken


def test_an_old_epoch_is_not_believed_while_the_allocator_is_asked() -> None:
    """It may come twice: the first time leads to the question, and the second must not pass for the answer."""
    fold = Fold(Counts())
    former, present = Writer(epoch=1), Writer(epoch=2)
    old = former.snapshot()
    for fact in (present.snapshot(), present.grant("a", "GPU-0"), old):
        fold.apply(fact)
    fold.of(NODE).asked = 5.0  # as the client notes when it asks
    again = fold.apply(old)
    fold.of(NODE).promised = 2  # as it notes when it is answered
    late, news = fold.apply(old), fold.apply(present.snapshot())

    assert (False, False, True) == (again, late, news)
    assert ["GPU-0"] == held(fold)
    assert {} == fold.broken


def test_an_overtaken_snapshot_leaves_the_node_to_be_asked_again() -> None:
    """The fact was of no use without the snapshot, and does not come a second time."""
    fold = Fold(Counts())
    writer = Writer(epoch=1)
    fold.apply(writer.snapshot())
    writer.grant("lost", "GPU-0")
    gap = writer.grant("a", "GPU-1")
    snapshot, late = writer.snapshot(), writer.grant("b", "GPU-2")
    news = [fold.apply(fact) for fact in (gap, late, snapshot)]
    asked = to_ask(fold)
    fold.apply(writer.snapshot())

    assert ([False, False, True], {NODE: None}) == (news, asked)
    assert ["GPU-0", "GPU-1", "GPU-2"] == held(fold)
    assert {} == fold.broken


def test_two_facts_with_one_number_are_a_doubt_until_a_snapshot() -> None:
    """F06: one of them is forged. The allocator is to be asked; if it announces by itself, that will do."""
    counts = Counts()
    fold = Fold(counts)
    true, forged = Writer(epoch=1), Writer(epoch=1)
    first = true.snapshot()
    forged.snapshot()
    lie, fact = forged.grant("lie", "GPU-1"), true.grant("a", "GPU-0")
    news = [fold.apply(event) for event in (first, lie, fact, true.grant("b", "GPU-2"))]
    in_doubt = to_ask(fold)
    healed = fold.apply(true.snapshot())

    assert [True, True, False, False] == news
    assert ({NODE: None}, 1, 0) == (in_doubt, counts.differences["allocations"], counts.repeated)
    assert (True, False, ["GPU-0", "GPU-2"]) == (healed, fold.anew, held(fold))


def test_an_allocator_that_begins_anew_in_a_doubt_ends_it_in_its_new_epoch() -> None:
    """Nothing of the epoch that it confirmed before comes any more."""
    fold, before, after = Fold(Counts()), Writer(epoch=7), Writer(epoch=8)
    fold.apply(before.snapshot())
    fold.mark_unconfirmed(NODE, (7, 1))
    fold.promise(NODE, 8, 1)

    assert (True, False) == (fold.apply(after.snapshot()), fold.is_unconfirmed(NODE))


def test_only_a_snapshot_of_the_confirmed_place_ends_a_doubt() -> None:
    """F06: also where what was believed has a later number; old ones and other epochs are not believed."""
    fold = Fold(Counts())
    writer, liar, other = Writer(epoch=5), Writer(epoch=5), Writer(epoch=9)
    old = writer.snapshot()
    fold.apply(old)
    liar.snapshot()
    for name in ("x", "y", "z"):
        fold.apply(liar.grant(name, f"GPU-{name}"))
    writer.grant("a", "GPU-0")
    fold.mark_unconfirmed(NODE, (writer.epoch, 2))
    refused = [fold.apply(event) for event in (old, other.snapshot())]
    accepted = fold.apply(writer.snapshot())

    assert ([False] * 2, True, True) == (refused, accepted, fold.anew)
    assert ["GPU-0"] == held(fold)


def test_a_new_fact_of_an_older_epoch_comes_from_a_twin() -> None:
    """Two allocators under one name: what the older one says after the newer one began is news that cannot be."""
    fold = Fold(Counts())
    former, present = Writer(epoch=1), Writer(epoch=2)
    for fact in (former.snapshot(), former.grant("a", "GPU-0"), present.snapshot()):
        fold.apply(fact)
    alone = dict(fold.duplicate_agents)
    fold.apply(former.grant("b", "GPU-1"))
    found = NODE in fold.duplicate_agents
    fold.count_agreement(NODE)
    once = NODE in fold.duplicate_agents
    fold.count_agreement(NODE)

    assert ({}, True, True, False) == (alone, found, once, NODE in fold.duplicate_agents)


def test_a_twin_that_goes_on_speaking_is_not_forgotten() -> None:
    fold = Fold(Counts())
    former, present = Writer(epoch=1), Writer(epoch=2)
    for fact in (former.snapshot(), present.snapshot(), former.grant("a", "GPU-0")):
        fold.apply(fact)
    fold.count_agreement(NODE)
    fold.apply(former.grant("b", "GPU-1"))
    fold.count_agreement(NODE)

    assert NODE in fold.duplicate_agents


def test_what_an_epoch_said_before_it_ended_is_no_sign_of_a_twin() -> None:
    """C38: a stream that was restored from an old copy says it again, and so does an outbox that is late."""
    counts = Counts()
    fold = Fold(counts)
    former, present = Writer(epoch=1), Writer(epoch=2)
    old = [former.snapshot(), former.grant("a", "GPU-0")]
    for fact in (*old, present.snapshot(), *old):
        fold.apply(fact)

    assert ({}, 0) == (fold.duplicate_agents, counts.duplicate_agents)
