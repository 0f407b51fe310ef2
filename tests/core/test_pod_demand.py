"""What a pod asks for as a whole, and which containers have CPUs and memory to themselves."""

import msgspec
import pytest
from decision_support import GIB, container, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY, ContainerName, PodName, ResourceName
from topoalign.core.model.requests import MOST_CONTAINERS, AdmissionRules, ContainerRequest, Mode, PodRequest, Qos

MAIN = ContainerName("main")
KUBELET = AdmissionRules(mode=Mode.KUBELET)


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

    assert {GPU: 4} == read_pod(staged, KUBELET).devices
    assert 5 == read_pod(staged, KUBELET).cpus
    assert {MEMORY: 2 * GIB} == read_pod(staged, KUBELET).memory


amounts = st.integers(0, 4)


@st.composite
def pods(draw: st.DrawFn) -> PodRequest:
    def some(kind: str, most: int) -> list[ContainerRequest]:
        return [
            container(
                f"{kind}-{i}",
                gpus=draw(amounts),
                cpus=draw(amounts),
                gib=draw(amounts),
                sidecar=kind == "init" and draw(st.booleans()),
            )
            for i in range(draw(st.integers(kind == "app", most)))
        ]

    return pod(*some("app", 2), init=some("init", 3))


@given(pods())
def test_what_a_pod_needs_is_the_most_of_any_moment(asked: PodRequest) -> None:
    """A moment is an init container beside the sidecars that run already, or all app containers beside all sidecars."""
    moments, sidecars = [], list[ContainerRequest]()
    for each in asked.init_containers:
        moments.append([*sidecars, each])
        sidecars += [each] if each.sidecar else []
    moments.append([*sidecars, *asked.containers])

    def most(resource: ResourceName) -> int:
        return max(sum(each.limits.get(resource, 0) for each in moment) for moment in moments)

    demand = read_pod(asked, AdmissionRules())

    assert ({GPU: most(GPU)} if most(GPU) else {}) == demand.devices
    assert most(CPU) // 1000 == demand.cpus
    assert most(MEMORY) == demand.memory.get(MEMORY, 0)
    assert 0 == read_pod(asked, AdmissionRules(cpu_manager="none")).cpus
    assert {} == read_pod(asked, AdmissionRules(memory_manager="None")).memory


def test_each_container_has_a_demand_of_its_own_with_its_role() -> None:
    """Init containers first, in the order in which they are decided; devices in the order of their names."""
    asked = pod(
        container("app", gpus=2, cpus=2, gib=1, others={"a.com/b": 3}),
        init=[container("first", gpus=4), container("proxy", cpus=1, sidecar=True)],
    )
    demand = read_pod(asked, AdmissionRules())

    assert [("first", "init"), ("proxy", "sidecar"), ("app", "app")] == [
        (each.container, each.role) for each in demand.containers
    ]
    app = demand.of(ContainerName("app"))
    assert [("a.com/b", 3), (GPU, 2)] == [*app.devices.items()]
    assert (2, {MEMORY: GIB}, (app,), None) == (app.cpus, app.memory, app.containers, demand.container)
    assert (demand, asked.namespace, asked.name) == (demand.of(None), demand.namespace, demand.pod)
    with pytest.raises(InvalidField, match="no container 'none'"):
        demand.of(ContainerName("none"))


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

    assert (kubelet, best) == tuple(read_pod(one, rules).of(MAIN).cpus for rules in (KUBELET, AdmissionRules()))


def test_in_mode_best_memory_is_asked_for_firmly_or_not_at_all() -> None:
    """Firm is a request that is its limit. The kubelet's memory manager looks at guaranteed pods, and at all of theirs."""
    one = pod(asking({"memory": GIB, "hugepages-2Mi": GIB}, {"memory": 2 * GIB, "hugepages-2Mi": GIB}))
    guaranteed = pod(asking({"cpu": 1, "memory": 0}, {"cpu": 1, "memory": 1}))

    assert {ResourceName("hugepages-2Mi"): GIB} == read_pod(one, AdmissionRules()).of(MAIN).memory
    assert {} == read_pod(one, KUBELET).of(MAIN).memory
    assert {} == read_pod(guaranteed, AdmissionRules()).memory


def test_memory_that_only_init_containers_ask_for_is_dropped_from_the_pod() -> None:
    pages = {"hugepages-2Mi": GIB}
    staged = pod(container("app", cpus=1, gib=1), init=[container("first", cpus=1, gib=2, others=pages)])

    assert {MEMORY: 2 * GIB} == read_pod(staged, KUBELET).memory
    assert CPU not in read_pod(staged, KUBELET).of(ContainerName("first")).memory


def test_a_pod_has_a_hundred_containers_at_most_init_containers_included() -> None:
    apps = [container(f"app-{i}") for i in range(MOST_CONTAINERS - 1)]

    assert MOST_CONTAINERS == 100
    validate_pod(pod(*apps, init=[container("first")]))
    with pytest.raises(InvalidField, match="more than 100 containers, init containers included"):
        validate_pod(pod(*apps, init=[container("first"), container("second")]))


class Asked(dict[ResourceName, int]):
    """Counts how often it is asked."""

    times = 0

    def get(self, resource: ResourceName, default: int = 0) -> int:  # type: ignore[override]  # no other is called
        self.times += 1
        return super().get(resource, default)


def test_the_qos_class_is_worked_out_once_for_all_containers_of_a_pod() -> None:
    limits = Asked({CPU: 1000, MEMORY: GIB})
    asking = PodRequest(name=PodName("p"), containers=(ContainerRequest(name=MAIN, limits=limits),))

    assert Qos.GUARANTEED == asking.qos
    times = limits.times
    assert Qos.GUARANTEED == asking.qos

    assert 0 < times == limits.times


ODD_POD = pod(asking({"cpu": -1}, {}))
ODD_RULES = AdmissionRules(reserved_cpus="?")
ODD_ANNOTATION = {"scheduling.koordinator.sh/device-odd": "{}"}


@pytest.mark.parametrize(
    ("request_", "rules", "field"),
    [
        pytest.param(ODD_POD, ODD_RULES, "pod.containers[0].requests[cpu]", id="the pod first"),
        pytest.param(pod(container()), ODD_RULES, "rules.reserved_cpus", id="then the rules"),
        pytest.param(pod(container()), AdmissionRules(), "pod.annotations", id="then the annotations"),
    ],
)
def test_a_pod_is_judged_before_rules_and_annotations(request_: PodRequest, rules: AdmissionRules, field: str) -> None:
    """Whatever the door, the first thing that is wrong is named in this order."""
    annotated = msgspec.structs.replace(request_, annotations=ODD_ANNOTATION)

    with pytest.raises(InvalidField) as refused:
        read_pod(annotated, rules)

    assert refused.value.field.startswith(field)


@pytest.mark.parametrize(("mode", "devices"), [(Mode.KUBELET, {GPU: 0}), (Mode.BEST, {})])
def test_a_limit_of_zero_devices_is_named_in_both_modes(mode: Mode, devices: dict[ResourceName, int]) -> None:
    """The kubelet asks for hints on it; mode `best` does not. What is noted of a resource depends on its name alone."""
    demand = read_pod(pod(asking({}, {GPU: 0})), AdmissionRules(mode=mode))

    assert (devices, frozenset({GPU})) == (demand.devices, demand.device_names)
