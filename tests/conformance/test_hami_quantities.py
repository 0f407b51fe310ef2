"""How HAMi reads amounts as text: what makes a container one that asks for nothing, and what counts as not said."""

import pytest

from topoalign.core.demand.shares import UNSET, HamiRequest
from topoalign.core.model.ids import ResourceName
from topoalign.tools.conformance.hami_quantities import NO_DEFAULTS, Defaults, plain_integer, read_request

NOTHING = HamiRequest()


def limits(amounts: dict[str, int | str]) -> dict[ResourceName, int | str]:
    """By `gpu`, `gpumem`, `percentage` and `gpucores`."""
    names = {"percentage": "nvidia.com/gpumem-percentage"}
    return {ResourceName(names.get(name, f"nvidia.com/{name}")): amount for name, amount in amounts.items()}


def request(count: int = 1, memory: int = 0, percent: int = UNSET, cores: int = 0) -> HamiRequest:
    return HamiRequest(count=count, vendor="NVIDIA", memory=memory, percent=percent, cores=cores)


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ({"gpu": "2"}, request(2, percent=100)),
        ({"gpu": "1.5"}, NOTHING),
        ({"gpu": 1, "gpumem": "2k"}, request(memory=2000)),
        ({"gpu": 1, "gpumem": (1 << 31) - 1}, request(memory=(1 << 31) - 1)),
        ({"gpu": 1, "gpumem": 1 << 31}, NOTHING),
        ({"gpu": 1, "gpumem": "64Gi"}, NOTHING),
        ({"gpu": 1, "gpumem": "16.0Gi"}, NOTHING),
        ({"gpu": 1, "gpumem": "2.0"}, NOTHING),
        ({"gpu": 1, "gpumem": -1}, NOTHING),
        ({"gpu": 1, "gpumem": "-1"}, NOTHING),
        ({"gpu": 1, "percentage": "0.5"}, request(percent=100)),
        ({"gpu": 1, "gpucores": "200"}, request(percent=100, cores=200)),
        ({"gpu": 1, "gpucores": "2.5"}, request(percent=100)),
        ({"gpu": (1 << 32) + 1, "gpucores": (1 << 31) + 30}, request(percent=100, cores=30 - (1 << 31))),
    ],
)
def test_what_is_no_plain_integer_or_too_much_is_nothing(amounts: dict[str, int | str], expected: HamiRequest) -> None:
    """Of cards and memory; of the others it counts as not said."""
    assert expected == read_request(limits(amounts), {})


@pytest.mark.parametrize(("memory", "factor", "expected"), [(4, 1024, 4096), (1 << 21, 1024, None), (4, 0, 4)])
def test_memory_is_too_much_in_the_unit_in_which_it_is_asked_for(
    memory: int, factor: int, expected: int | None
) -> None:
    found = read_request(limits({"gpu": 1, "gpumem": memory}), {}, Defaults(memory_factor=factor))

    assert (NOTHING if expected is None else request(memory=expected)) == found


def test_a_limit_counts_before_a_request_even_if_it_is_none() -> None:
    said, asked = limits({"gpu": 1, "gpucores": "2.5"}), limits({"gpu": "x", "gpumem": 5, "gpucores": 30})

    assert request(memory=5) == read_request(said, asked, NO_DEFAULTS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-12", -12), ("+12", 12), ("64Gi", 64 << 30), ("2k", 2000), ("1.5k", 1500), ("1.50k", 1500),
        ("1e3", 1000), ("1E2", 100), ("1.5e1", 15), ("1E", 10**18), ("16.Gi", 16 << 30), ("99Ti", 99 << 40),
        ("100Ti", None), ("1Pi", None), ("1Ei", None), ("10E", None), ("1000000000000000000", None), ("16.0Gi", None),
        ("2.0", None), ("2000m", None), ("1.5", None), ("10e-1", None), ("1000000u", None), ("8Ei", None),
        ("x", None), ("1.0005k", None), ("", None), ("--1", None),
    ],
)  # fmt: skip
def test_plain_integers_are_those_that_kubernetes_keeps_as_such(text: str, value: int | None) -> None:
    assert value == plain_integer(text)
