"""The keys of nodes for one request: numbers instead of keys, and when they are computed anew."""

from topoalign.registry.scheduling.filter.decision_cache import NodeKeys


def test_keys_are_stale_once_most_belong_to_no_node() -> None:
    """Two nodes; each change of a node brings a new key."""
    keys, changes = NodeKeys(), 0
    while not keys.are_stale:
        keys.note(changes % 2, (changes,))
        changes += 1

    assert 4 * 2 + 64 == changes
    assert 2 == len(keys.numbers)


def test_nodes_with_equal_keys_have_one_number() -> None:
    keys = NodeKeys()
    for place, key in enumerate(((1,), (2,), (1,), None)):
        keys.note(place, key)

    assert [1, 2, 1, 0] == keys.numbers
