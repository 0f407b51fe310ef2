"""
What a pod holds when it is counted card by card, as HAMi does, against a reference written from its rules; and the reading
of what a ResourceQuota limits.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.kubelet.files.manifest import read_quota_limits
from topoalign.tools.conformance.hami_cases import Share
from topoalign.tools.conformance.hami_decision_cases import Quota, QuotaExpected, QuotaInput
from topoalign.tools.conformance.hami_decisions import quota_fit


@dataclass
class Namespace:
    """Limits by resource."""

    memory: int | None = None
    cores: int | None = None


Given = list[tuple[str, int, int]]
"""UUID, memory and cores of each card that a container has."""


def effective(containers: list[Given], init: int) -> dict[str, tuple[int, int]]:
    """Memory and cores by uuid."""
    found = {}
    for uuid in {uuid for each in containers for uuid, _, _ in each}:
        mine = [[(m, c) for u, m, c in each if u == uuid] for each in containers]
        first = [entry for entries in mine[:init] for entry in entries]
        others = [entry for entries in mine[init:] for entry in entries]
        found[uuid] = (
            max([m for m, _ in first] + [sum(m for m, _ in others)]),
            max([c for _, c in first] + [sum(c for _, c in others)]),
        )
    return found


def allowed(namespace: Namespace | None, containers: list[Given], init: int) -> bool:
    if namespace is None:
        return True
    use = effective(containers, init).values()
    memory, cores = sum(m for m, _ in use), sum(c for _, c in use)
    return not (
        (namespace.memory is not None and memory > namespace.memory)
        or (namespace.cores is not None and cores > namespace.cores)
    )


MEMORY, CORES = "limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"

shares = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 100, 1024]), st.sampled_from([0, 20, 50]))
pods = st.lists(st.lists(shares, max_size=3), max_size=4)
namespaces = st.none() | st.builds(
    Namespace, st.sampled_from([None, 0, 256, 1024, 3000]), st.sampled_from([None, 0, 50, 100])
)
ANY = QuotaExpected(0, within_quota=True)


@given(pods, st.lists(shares, min_size=1, max_size=3), st.integers(0, 6), namespaces)
def test_a_pod_uses_of_each_card_the_peak_of_its_phases(
    before: list[Given], last: Given, init: int, namespace: Namespace | None
) -> None:
    pod = [*before, last]
    hard = {} if namespace is None else {MEMORY: namespace.memory, CORES: namespace.cores}
    quota = Quota("ml", {name: limit for name, limit in hard.items() if limit is not None})
    containers = [[Share(*each) for each in container] for container in pod]

    found = quota_fit(QuotaInput("ml", containers[-1].pop(), containers[:-1], containers[-1], init, quota), ANY)

    memory = sum(memory for memory, _ in effective(pod, init).values())
    assert QuotaExpected(memory, allowed(namespace, pod, init)) == found


@pytest.mark.parametrize(("card", "expected"), [("gpu-0", 1024), ("gpu-1", 2048)])
def test_init_containers_on_two_cards_count_twice(card: str, expected: int) -> None:
    """Before cards are known nobody can count so: for topoalign's own quotas both pods hold 1024."""
    given = QuotaInput("ml", Share(card, 1024, 0), [[Share("gpu-0", 1024, 0)]], [], 2)

    assert QuotaExpected(expected, within_quota=True) == quota_fit(given, ANY)


def test_a_quota_of_another_namespace_limits_nothing() -> None:
    given = QuotaInput("ml", Share("gpu-0", 1024, 0), [], [], 0, Quota("other", {MEMORY: 0}))

    assert QuotaExpected(1024, within_quota=True) == quota_fit(given, ANY)


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        ({}, {}),
        ({MEMORY: 2048, CORES: "0"}, {"nvidia.com/gpumem": 2048, "nvidia.com/gpucores": 0}),
        ({MEMORY: "2k"}, {"nvidia.com/gpumem": 2000}),
        ({"requests.nvidia.com/gpumem": 1, "limits.cpu": 1, "pods": 1}, {}),
        ({MEMORY: "x", CORES: "-1"}, {}),
    ],
)
def test_limits_are_those_of_extended_resources(hard: dict[str, int | str], expected: dict[str, int]) -> None:
    assert expected == read_quota_limits(hard)
