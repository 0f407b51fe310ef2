"""Lists of ids are read and written as the kernel does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.topology.cpuset import LARGEST_ID, format_cpuset, parse_cpuset


@given(st.frozensets(st.integers(0, LARGEST_ID), max_size=50) | st.frozensets(st.integers(0, 40)))
def test_what_is_written_reads_as_the_same_ids(ids: frozenset[int]) -> None:
    assert ids == parse_cpuset(format_cpuset(ids))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 8), "0-2,8"),
        ((8, 2, 1, 0, 0), "0-2,8"),
        ((252, 255), "252,255"),
    ],
)
def test_runs_are_written_as_ranges(ids: tuple[int, ...], text: str) -> None:
    assert text == format_cpuset(ids)


@pytest.mark.parametrize(
    "text", ["-", "-1", "1-", ",", "0,", ",0", "0--1", "3-1", "0-65536", "a", "0-a", "1 2", "٣", "9" * 100, "0;1"]
)
def test_what_is_no_list_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an ascending range|is neither a number nor a range"):
        parse_cpuset(text)


@pytest.mark.parametrize("text", ["", " ", "\n", "0-3\n", " 0 , 2 "])
def test_blanks_around_parts_do_not_matter(text: str) -> None:
    assert parse_cpuset(text) == parse_cpuset("".join(text.split()))
