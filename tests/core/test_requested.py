"""What a pod asks for as a whole, and which containers have CPUs and memory to themselves."""

import pytest
from decision_support import GIB, container, pod

from topoalign.core.hints.requested import cpu_request, device_request, memory_request
from topoalign.core.ids import CPU, GPU, MEMORY, ContainerName
from topoalign.core.requests import ContainerRequest, Mode

MAIN = ContainerName("main")


def test_a_pod_needs_the_most_that_runs_at_a_time() -> None:
    """
    Plain init containers run one by one beside the sidecars started before them; app containers run beside all sidecars.
    """
    staged = pod(
        container("app", gpus=2, cpus=2, gib=1),
        init=[
            container("first", gpus=4, cpus=1, gib=1),
            container("proxy", gpus=1, cpus=1, gib=1, sidecar=True),
            container("second", gpus=1, cpus=4, gib=1),
        ],
    )

    assert {GPU: 4} == device_request(staged, None)
    assert 5 == cpu_request(staged, None, Mode.KUBELET)
    assert {MEMORY: 2 * GIB} == memory_request(staged, None, Mode.KUBELET)


def asking(requests: dict[str, int], limits: dict[str, int]) -> ContainerRequest:
    return ContainerRequest(name=MAIN, requests=requests, limits=limits)  # type: ignore[arg-type]  # plain text keys


@pytest.mark.parametrize(
    ("requests", "limits", "kubelet", "best"),
    [
        pytest.param({"cpu": 2000, "memory": GIB}, {"cpu": 2000, "memory": GIB}, 2, 2, id="guaranteed, whole"),
        pytest.param({"cpu": 2000}, {"cpu": 2000}, 0, 2, id="firm, but not guaranteed without memory"),
        pytest.param({}, {"cpu": 2000}, 0, 2, id="a limit alone is requested too"),
        pytest.param({"cpu": 1500, "memory": GIB}, {"cpu": 1500, "memory": GIB}, 0, 0, id="not whole"),
        pytest.param({"cpu": 1000, "memory": GIB}, {"cpu": 2000, "memory": GIB}, 0, 0, id="may use more"),
    ],
)
def test_exclusive_cpus(requests: dict[str, int], limits: dict[str, int], kubelet: int, best: int) -> None:
    one = pod(asking(requests, limits))

    assert (kubelet, best) == (cpu_request(one, MAIN, Mode.KUBELET), cpu_request(one, MAIN, Mode.BEST))


def test_memory_that_only_init_containers_ask_for_is_dropped_from_the_pod() -> None:
    pages = {"hugepages-2Mi": GIB}
    staged = pod(container("app", cpus=1, gib=1), init=[container("first", cpus=1, gib=2, others=pages)])

    assert {MEMORY: 2 * GIB} == memory_request(staged, None, Mode.KUBELET)
    assert CPU not in memory_request(staged, ContainerName("first"), Mode.KUBELET)
