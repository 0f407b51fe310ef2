"""Which pods can be meant: every rule with the last request that is sound and the first that is refused, by its path."""

from collections.abc import Mapping

import msgspec
import pytest
from decision_support import container, pod

from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import ContainerName, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy, Qos, override_rules

DEVICE, PAGES = ResourceName("nvidia.com/gpu"), ResourceName("hugepages-2Mi")


def asking(
    requests: Mapping[str, int], limits: Mapping[str, int] | None = None, sidecar: bool = False
) -> ContainerRequest:
    given = dict(requests) if limits is None else dict(limits)
    return ContainerRequest(
        name=ContainerName("c"),
        requests={ResourceName(name): amount for name, amount in requests.items()},
        limits={ResourceName(name): amount for name, amount in given.items()},
        sidecar=sidecar,
    )


def named(*names: str) -> tuple[ContainerRequest, ...]:
    return tuple(ContainerRequest(name=ContainerName(name)) for name in names)


def annotated(annotations: dict[str, str]) -> PodRequest:
    return PodRequest(name=PodName("p"), containers=named("c"), annotations=annotations)


def many(count: int) -> dict[str, int]:
    return {f"example.com/r{i}": 1 for i in range(count)}


ONE = PodRequest(name=PodName("p"), containers=named("c"))


@pytest.mark.parametrize(
    "sound",
    [
        pod(*named("c")),
        pod(*named(*(f"c{i}" for i in range(99))), init=named("i")),
        pod(*named("c" + "-" * 252)),
        pod(*named("A.b_c-9")),
        pod(asking({"cpu": 1, "memory": 1}, {})),
        pod(asking({"cpu": 1}, {"cpu": 1, "memory": 5})),
        pod(asking({}, {"nvidia.com/gpu": 2, "hugepages-2Mi": 4})),
        pod(asking(many(64))),
        pod(asking({"x" * 317: 1})),
        pod(asking({"cpu": 2**63 - 1, "memory": 0})),
        pod(container(), init=[asking({}, sidecar=True)]),
        annotated({f"k{i}": "" for i in range(1_000)}),
        annotated({"k": "x" * (256 * 1024 - 1)}),
        annotated({"example.com/" + "x" * 63: "any\nthing"}),
        annotated({"d" * 253 + "/k": ""}),
        annotated({"k-_.9": ""}),
    ],
)
def test_what_can_be_meant_is_taken(sound: PodRequest) -> None:
    """With requests filled in from limits, and nothing else changed."""
    got = validate_pod(sound)

    filled = [{**each.limits, **each.requests} for each in (*sound.init_containers, *sound.containers)]
    assert filled == [each.requests for each in (*got.init_containers, *got.containers)]
    assert [each.limits for each in (*sound.init_containers, *sound.containers)] == [
        each.limits for each in (*got.init_containers, *got.containers)
    ]
    assert (sound.name, sound.namespace, sound.annotations) == (got.name, got.namespace, got.annotations)


@pytest.mark.parametrize(
    ("resource", "what"), [("hugepages-2Mi", "hugepages needs"), ("nvidia.com/gpu", "a device needs")]
)
def test_a_request_without_an_equal_limit_is_refused_by_its_kind(resource: str, what: str) -> None:
    with pytest.raises(InvalidField, match="has no limit") as caught:
        validate_pod(pod(asking({resource: 4}, {})))

    assert f"{what} equal ones" == caught.value.remedy


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        (pod(init=named("i")), "pod.containers"),
        (pod(*named(*(f"c{i}" for i in range(100))), init=named("i")), "pod.containers"),
        (msgspec.structs.replace(ONE, name=PodName("")), "pod.name"),
        (msgspec.structs.replace(ONE, name=PodName("x" * 254)), "pod.name"),
        (msgspec.structs.replace(ONE, name=PodName("-p")), "pod.name"),
        (msgspec.structs.replace(ONE, name=PodName("p/q")), "pod.name"),
        (msgspec.structs.replace(ONE, namespace=Namespace("n s")), "pod.namespace"),
        (pod(*named("a", "b\n")), "pod.containers[1].name"),
        (pod(*named("a"), init=named("i", "")), "pod.initContainers[1].name"),
        (pod(*named("a", "b", "a")), "pod.containers[2].name"),
        (pod(*named("a"), init=named("a")), "pod.containers[0].name"),
        (pod(asking({}, sidecar=True)), "pod.containers[0].sidecar"),
        (pod(asking(many(65), {})), "pod.containers[0].requests"),
        (pod(asking({}, many(65))), "pod.containers[0].limits"),
        (pod(asking({"": 1})), "pod.containers[0].requests[]"),
        (pod(asking({"x" * 318: 1}, {})), f"pod.containers[0].requests[{'x' * 79}…]"),
        (pod(asking({"a\x1bb": 1}, {})), "pod.containers[0].requests[a?b]"),
        (pod(asking({"cpu": -1})), "pod.containers[0].requests[cpu]"),
        (pod(asking({"cpu": 2**63})), "pod.containers[0].requests[cpu]"),
        (pod(asking({}, {"cpu": -1})), "pod.containers[0].limits[cpu]"),
        (pod(asking({"cpu": 2}, {"cpu": 1})), "pod.containers[0].requests[cpu]"),
        (pod(asking({"nvidia.com/gpu": 1}, {})), "pod.containers[0].requests[nvidia.com/gpu]"),
        (pod(asking({"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 2})), "pod.containers[0].requests[nvidia.com/gpu]"),
        (pod(asking({"hugepages-2Mi": 1}, {"hugepages-2Mi": 2})), "pod.containers[0].requests[hugepages-2Mi]"),
        (annotated({f"k{i}": "" for i in range(1_001)}), "pod.annotations"),
        (annotated({"k": "x" * 256 * 1024}), "pod.annotations"),
        (annotated({"a b": ""}), "pod.annotations[a b]"),
        (annotated({"x" * 64: ""}), f"pod.annotations[{'x' * 64}]"),
        (annotated({"e/" + "x" * 64: ""}), f"pod.annotations[e/{'x' * 64}]"),
        (annotated({"d" * 254 + "/k": ""}), f"pod.annotations[{'d' * 79}…]"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_path(odd: PodRequest, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        validate_pod(odd)

    assert field == caught.value.field


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([asking({})], Qos.BEST_EFFORT),
        ([asking({"nvidia.com/gpu": 1})], Qos.BEST_EFFORT),
        ([asking({"cpu": 0, "memory": 0})], Qos.BEST_EFFORT),
        ([asking({"cpu": 1, "memory": 1})], Qos.GUARANTEED),
        ([asking({}, {"cpu": 1, "memory": 1})], Qos.GUARANTEED),
        ([asking({"cpu": 1, "memory": 1}, {})], Qos.BURSTABLE),
        ([asking({"cpu": 1, "memory": 1}, {"cpu": 2, "memory": 1})], Qos.BURSTABLE),
        ([asking({"cpu": 1, "memory": 1}, {"cpu": 1, "memory": 2})], Qos.BURSTABLE),
        ([asking({"cpu": 1})], Qos.BURSTABLE),
        ([asking({"memory": 1})], Qos.BURSTABLE),
        ([asking({"cpu": 1, "memory": 1}), asking({})], Qos.BURSTABLE),
        ([asking({"cpu": 1, "memory": 1}), asking({"cpu": 2, "memory": 2})], Qos.GUARANTEED),
    ],
)
def test_the_qos_class_is_that_of_kubernetes(containers: list[ContainerRequest], expected: Qos) -> None:
    """Guaranteed: every container has limits of CPU and memory, and requests no less. Init containers count."""
    first, *rest = containers

    assert expected is pod(*containers).qos
    assert expected is pod(*(rest or [first]), init=[first]).qos


def test_rules_are_changed_by_name_and_a_wrong_one_is_named() -> None:
    """Numbers and words may come as text."""
    got = override_rules(
        AdmissionRules(reserved_cpu_count=3), {"policy": "restricted", "max_allowable_numa_nodes": "9"}
    )

    assert AdmissionRules(policy=Policy.RESTRICTED, max_allowable_numa_nodes=9, reserved_cpu_count=3) == got
    for rule, value in (("policy", "odd"), ("colour", "red"), ("max_allowable_numa_nodes", "x")):
        with pytest.raises(InvalidField, match=rule) as caught:
            override_rules(AdmissionRules(), {rule: value})
        assert "rules" == caught.value.field
