"""The persistent map against a dict that is copied for every change."""

from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.state.persistent_map import FEWEST, PersistentMap

CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers()), max_size=60)


@given(st.dictionaries(st.integers(0, 12), st.integers()), CHANGES)
def test_every_version_is_like_a_dict_of_its_own(entries: dict[int, int], changes: list[tuple[bool, int, int]]) -> None:
    """Each change leaves all maps before it as they were, their order included."""
    versions = [(PersistentMap(entries), dict(entries))]
    for is_put, key, value in changes:
        mapped, plain = versions[-1]
        if is_put:
            versions.append((mapped.put(key, value), {**plain, key: value}))
        elif key in plain:
            versions.append((mapped.drop(key), {name: kept for name, kept in plain.items() if name != key}))

    for mapped, plain in versions:
        assert [*plain.items()] == [(key, mapped[key]) for key in mapped]
        assert [*plain.items()] == [*mapped.items()] == [*zip(mapped.keys(), mapped.values(), strict=True)]
        assert len(plain) == len(mapped)
        assert [key in plain for key in range(13)] == [key in mapped for key in range(13)]
        assert plain == mapped


def test_a_key_that_is_not_there_is_no_entry() -> None:
    gone = PersistentMap({1: "a"}).drop(1)

    for absent in (PersistentMap[int, str]({}), gone):
        for raising in (absent.drop, absent.__getitem__):
            try:
                raising(1)
            except KeyError:
                continue
            raise AssertionError
    assert None is gone.get(1)


def test_a_change_copies_few_entries_of_many() -> None:
    """With 10,000 entries no map has more than 108 changes beside the shared dict, and few of them make a new dict."""
    held = PersistentMap(dict.fromkeys(range(10_000), ""))
    made = set()
    most = 0
    for key in range(10_000, 11_000):
        held = held.put(key, "")
        base, changes = held._layers
        made.add(id(base))
        most = max(most, len(changes))

    assert FEWEST + 100 >= most - 5
    assert 11 >= len(made)
    assert 11_000 == len(held)
