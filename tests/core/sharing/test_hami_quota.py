"""What a namespace may hold, against a reference written from HAMi's rules."""

import hami_reference as reference
import pytest
from hami_support import namespaces, quota
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.sharing.hami.quota import NamespaceQuota, effective_use, namespace_quota, within_quota
from topoalign.core.sharing.hami.usage import CardShare

shares = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 100, 1024]), st.sampled_from([0, 20, 50]))
pods = st.lists(st.lists(shares, max_size=3), max_size=5)


@settings(max_examples=200, deadline=None)
@given(pods, st.integers(0, 6), namespaces)
def test_a_pod_uses_the_peak_of_its_phases(
    pod: list[reference.Given], init: int, namespace: reference.Namespace | None
) -> None:
    containers = [[CardShare(uuid=DeviceID(u), memory=m, cores=c) for u, m, c in given] for given in pod]
    limits = None if namespace is None else quota(namespace)

    assert reference.effective(pod, init) == {
        uuid: (use.slots, use.memory, use.cores) for uuid, use in effective_use(containers, init).items()
    }
    assert reference.allowed(namespace, pod, init) == within_quota(limits, containers, init)


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        ([], NamespaceQuota()),
        ([{"limits.nvidia.com/gpumem": 2048}], NamespaceQuota(memory=2048)),
        ([{"limits.nvidia.com/gpumem": "2k", "limits.nvidia.com/gpucores": "0"}], NamespaceQuota(memory=2000, cores=0)),
        ([{"requests.nvidia.com/gpumem": 1, "limits.nvidia.com/gpu": 1}], NamespaceQuota()),
        ([{"limits.nvidia.com/gpumem": "1.5"}], NamespaceQuota()),
        ([{"limits.nvidia.com/gpumem": 7}, {"limits.nvidia.com/gpumem": 5}], NamespaceQuota(memory=5)),
    ],
)
def test_limits_are_those_of_all_quotas(hard: list[dict[str, int | str]], expected: NamespaceQuota) -> None:
    assert expected == namespace_quota(hard)


def test_memory_is_limited_in_the_unit_in_which_it_is_asked_for() -> None:
    hard: dict[str, int | str] = {"limits.nvidia.com/gpumem": 5, "limits.nvidia.com/gpucores": 50}

    found = namespace_quota([hard], used_memory=4096, used_cores=20, memory_factor=1024)

    assert NamespaceQuota(memory=5120, cores=50, used_memory=4096, used_cores=20) == found
    assert [True, False, False] == [found.admits(*each) for each in ((1024, 30), (1025, 0), (0, 31))]


def test_a_limit_of_nothing_lets_nothing_through() -> None:
    assert not NamespaceQuota(memory=0).admits(1, 0)
    assert NamespaceQuota(memory=0).admits(0, 50)
