"""Ids of sockets: the kernel's where they tell packages apart, else counted."""

from hypothesis import given
from hypothesis import strategies as st

from topoalign.machines.reader_rules import number_sockets


def test_ids_that_name_one_package_each_are_kept() -> None:
    assert {0: 4, 1: 65_535, 2: 4} == number_sockets({0: (4, "a"), 1: (65_535, "b"), 2: (4, "a")})


def test_packages_are_counted_where_an_id_is_missing_shared_or_too_large() -> None:
    assert {0: 0, 1: 1, 2: 0} == number_sockets({0: (None, "a"), 1: (None, "b"), 2: (None, "a")})
    assert {3: 0, 5: 1} == number_sockets({5: (7, "b"), 3: (7, "a")})
    assert {0: 0, 1: 1} == number_sockets({0: (5, "a"), 1: (65_536, "b")})
    assert {0: 0, 1: 1} == number_sockets({0: (5, "a"), 1: (None, "none")})


@given(
    st.dictionaries(st.integers(0, 99), st.tuples(st.none() | st.integers(0, 3) | st.just(99_999), st.integers(0, 3)))
)
def test_two_cpus_are_on_one_socket_if_and_only_if_they_are_in_one_package(
    packages: dict[int, tuple[int | None, int]],
) -> None:
    sockets = number_sockets(packages)

    assert packages.keys() == sockets.keys()
    for a in packages:
        for b in packages:
            assert (packages[a] == packages[b]) == (sockets[a] == sockets[b]), (a, b)
    assert all(0 <= socket <= 65_535 for socket in sockets.values())
