"""Numbers on the command line mean what Kubernetes means by them, and nonsense is refused with the option's name."""

from decimal import ROUND_CEILING, Decimal

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.cli.formatting import binary
from topoalign.cli.options import parse_size
from topoalign.core.model.requests import LARGEST_QUANTITY
from topoalign.kubelet.files.resource_quantities import whole

UNITS = {
    "": "1",
    "k": "1e3",
    "M": "1e6",
    "G": "1e9",
    "T": "1e12",
    "m": "1e-3",
    "Ki": "1024",
    "Mi": str(1024**2),
    "Gi": str(1024**3),
    "e3": "1e3",
    "E-1": "1e-1",
}


@given(
    number=st.decimals(0, 10**6, places=6, allow_nan=False, allow_infinity=False), unit=st.sampled_from(sorted(UNITS))
)
def test_a_quantity_is_its_number_times_its_unit_rounded_up_to_a_byte(number: Decimal, unit: str) -> None:
    expected = int((number * Decimal(UNITS[unit])).to_integral_value(ROUND_CEILING))

    assert expected == whole(f"{number:f}{unit}")


@pytest.mark.parametrize(
    ("text", "expected"), [("64Gi", 64 * 2**30), ("1.5G", 1_500_000_000), ("1e9", 10**9), ("0", 0), (".5Ki", 512)]
)
def test_sizes_that_people_write(text: str, expected: int) -> None:
    assert expected == whole(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 Gi",
        "-1",
        "+1",
        "NaN",
        "inf",
        "1GB",
        "1gi",
        "1e",
        "0x10",
        "٣",
        "1,5G",
        "1e999",
        "9Ei",
        "9" * 99,
        "1_0",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    assert None is whole(text)


def test_the_largest_size_is_that_of_kubernetes() -> None:
    assert LARGEST_QUANTITY == whole(str(LARGEST_QUANTITY))
    assert None is whole(str(LARGEST_QUANTITY + 1))


def test_a_size_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(click.BadParameter, match="64Gi"):
        parse_size("lots")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 * 2**30, "64 GiB")]
)
def test_bytes_are_shown_in_the_largest_unit_that_leaves_one(size: int, text: str) -> None:
    assert text == binary(size)
