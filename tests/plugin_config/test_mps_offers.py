"""What is offered by `sharing.mps`, and what of it is refused."""

import msgspec
import pytest
from serving_support import configured, gpu, listed, machine, made, said

from topoalign.core.model.errors import InvalidField

FLAGS = "flags: {mpsRoot: /run/nvidia/mps}\nsharing: {mps: "
GPU_BY_2 = FLAGS + "{resources: [{name: nvidia.com/gpu, replicas: 2"
FOUR = ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]
MIXED = "flags: {migStrategy: mixed, mpsRoot: /run/nvidia/mps}\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"
LIMITED = "flags: {mpsRoot: /run/nvidia/mps}\nsharing: {limiter: mps, "
SLICED = "timeSlicing: {resources: [{name: gpu, replicas: 2"


@pytest.mark.parametrize(
    ("text", "resource", "ids"),
    [
        (GPU_BY_2 + "}]}}", "nvidia.com/gpu", FOUR),
        (GPU_BY_2 + "}], renameByDefault: true}}", "nvidia.com/gpu.shared", FOUR),
        (GPU_BY_2 + ", rename: small}]}}", "nvidia.com/small", FOUR),
        (GPU_BY_2 + ", rename: small, devices: [GPU-1]}]}}", "nvidia.com/small", FOUR[2:]),
    ],
)
def test_shares_by_mps_have_the_ids_and_names_of_time_slices(text: str, resource: str, ids: list[str]) -> None:
    offering = made(machine([gpu(0), gpu(1)]), text)
    (by_mps,) = [offer for offer in offering.offers if offer.sharing == "mps"]

    assert (resource, 2, 1) == (by_mps.resource, by_mps.replicas, by_mps.most), "one share a container by default"
    assert ids == listed(offering)[resource]
    assert [] == said(offering)


def test_more_than_one_share_is_allowed_where_the_file_says_so() -> None:
    (offer,) = made(machine([gpu(0)]), GPU_BY_2 + "}], failRequestsGreaterThanOne: false}}").offers

    assert offer.most is None


def test_two_resources_may_be_shared_in_two_ways() -> None:
    text = (
        "flags: {mpsRoot: /mps}\n"
        "resources: {gpus: [{uuids: [GPU-1], name: other}]}\n"
        "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}, "
        "timeSlicing: {resources: [{name: other, replicas: 3}]}}"
    )
    found = made(machine([gpu(0), gpu(1)]), text).offers

    assert [("nvidia.com/gpu", "mps", 2), ("nvidia.com/other", "time-slicing", 3)] == [
        (offer.resource, offer.sharing, offer.replicas) for offer in found
    ]


def test_units_and_slots_that_mps_limits_say_so_and_are_not_warned_of() -> None:
    """One limiter for both, and the GPUs that stay whole have none; in the event it is a value of `sharing`."""
    gpus = [msgspec.structs.replace(gpu(number), memory=1 << 30) for number in range(3)]
    text = "resources: {gpus: [{indexes: [1], name: b}, {indexes: [2], name: c}]}\n" + LIMITED
    found = made(machine(gpus), text + "slots: {}, units: {name: b}}")

    assert [("nvidia.com/gpu", "mps"), ("tencent.com/vcuda-core", "mps"), ("tencent.com/vcuda-memory", "mps")] == [
        (offer.resource, offer.limited_by) for offer in found.offers if offer.by_amounts
    ]
    assert [("nvidia.com/c", None, "time-slicing")] == [
        (offer.resource, offer.limited_by, offer.sharing) for offer in found.offers if not offer.by_amounts
    ]
    assert [] == said(found)


@pytest.mark.parametrize(
    ("strategy", "parts", "resources", "why"),
    [
        ("none", "slots: {}", [], "are in MIG mode"),
        ("single", "slots: {}", [], "which MPS does not limit"),
        ("none", "units: {}", ["nvidia.com/gpu"], "in MIG mode: offered as a whole"),
    ],
)
def test_gpus_in_mig_mode_are_never_limited_by_mps(strategy: str, parts: str, resources: list[str], why: str) -> None:
    text = LIMITED.replace("{mpsRoot", f"{{migStrategy: {strategy}, mpsRoot") + parts + "}"
    found = made(machine([msgspec.structs.replace(gpu(0, ["1g.10gb"]), memory=1 << 30)]), text)

    assert [(resource, None) for resource in resources] == [
        (str(each.resource), each.limited_by) for each in found.offers
    ]
    assert any(why in each for each in said(found))


@pytest.mark.parametrize("strategy", ["none", "single"])
def test_gpus_in_mig_mode_are_not_offered_by_mps(strategy: str) -> None:
    """A whole GPU was not asked for, and MPS cannot share an instance: neither is offered, and the reason is said."""
    text = MIXED.replace("mixed", strategy)
    offering = made(machine([gpu(0, ["1g.10gb", "1g.10gb"])]), text)

    assert () == offering.offers
    (severe,) = [finding for finding in offering.findings if finding.severe]
    assert "sharing.mps.resources[0]" == severe.field and severe.remedy


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        (MIXED, "flags.migStrategy", "none or single"),
        ("sharing: {limiter: mps}", "sharing.limiter", "add sharing.units or sharing.slots"),
        (GPU_BY_2 + "}]}, limiter: mps}", "sharing.limiter", "sharing.units or sharing.slots"),
        ("sharing: {units: {}, limiter: mps}", "flags.mpsRoot", "/run/nvidia/mps"),
        ("sharing: {slots: {}, limiter: mps}", "flags.mpsRoot", "/run/nvidia/mps"),
        (GPU_BY_2 + "}]}, units: {}, limiter: mps}", "sharing.units.name", "one way"),
        (GPU_BY_2 + "}]}, slots: {}, limiter: mps}", "sharing.slots.name", "one way"),
        (LIMITED + "slots: {replicas: 49}}", "sharing.slots.replicas", "2 to 48"),
        (LIMITED + "slots: {priorities: true}}", "sharing.slots.priorities", "hami-core"),
        (LIMITED.replace("{mps", "{migStrategy: dynamic, mps") + "slots: {}}", "sharing.limiter", "leave it out"),
        (
            LIMITED.replace("{mps", "{migStrategy: mixed, mps") + "slots: {name: mig-1g.5gb}}",
            "sharing.limiter",
            "leave the limiter out",
        ),
        (
            "resources: {mig: [{pattern: 1g.*, name: small}]}\n" + LIMITED + "slots: {name: small}}",
            "sharing.limiter",
            "leave the limiter out",
        ),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "flags.mpsRoot", "/run/nvidia/mps"),
        (FLAGS + "{}}", "sharing.mps.resources", "leave mps out"),
        (FLAGS + "{resources: []}}", "sharing.mps.resources", "leave mps out"),
        (FLAGS + "{renameByDefault: true}}", "sharing.mps.resources", "leave mps out"),
        (FLAGS + "{resources: [{name: gpu, replicas: 1}]}}", "sharing.mps.resources[0].replicas", "2 to 48"),
        (FLAGS + "{resources: [{name: gpu, replicas: 49}]}}", "sharing.mps.resources[0].replicas", "2 to 48"),
        (FLAGS + "{resources: [{name: gpu}]}}", "sharing.mps.resources[0]", "docs/configuration.md"),
        (FLAGS + "{resources: [{replicas: 2}]}}", "sharing.mps.resources[0]", "docs/configuration.md"),
        (FLAGS + "{share: 2}}", "sharing.mps", "docs/configuration.md"),
        (FLAGS + "{resources: [{name: mig-1g.10gb, replicas: 2}]}}", "sharing.mps.resources[0].name", "timeSlicing"),
        (
            FLAGS + "{resources: [{name: topoalign.io/nic, replicas: 2}]}}",
            "sharing.mps.resources[0].name",
            "timeSlicing",
        ),
        (
            "resources: {mig: [{pattern: '*', name: small}]}\n" + FLAGS + "{resources: [{name: small, replicas: 2}]}}",
            "sharing.mps.resources[0].name",
            "timeSlicing",
        ),
        (GPU_BY_2 + "}, {name: gpu, replicas: 3}]}}", "sharing.mps.resources[1].name", "once"),
        (GPU_BY_2 + "}]}, " + SLICED + "}]}}", "sharing.mps.resources[0].name", "one way"),
        (
            FLAGS + "{resources: [{name: a, replicas: 2, rename: gpu.few}]}, " + SLICED + ", rename: gpu.few}]}}",
            "sharing.mps.resources[0].rename",
            "one way",
        ),
        (
            FLAGS + "{resources: [{name: a, replicas: 2, rename: few}, {name: b, replicas: 3, rename: few}]}}",
            "sharing.mps.resources[1].replicas",
            "same number",
        ),
        (
            GPU_BY_2 + ", devices: [0]}], failRequestsGreaterThanOne: false}}",
            "sharing.mps.resources[0].rename",
            "a name of their own",
        ),
        (GPU_BY_2 + ", rename: topoalign.io/nic}]}}", "sharing.mps.resources[0].rename", "another name"),
        (GPU_BY_2 + ", devices: ['GPU-0::1']}]}}", "sharing.mps.resources[0].devices[0]", "uuid"),
    ],
)
def test_what_mps_cannot_do_is_refused_with_its_field_and_a_remedy(text: str, field: str, remedy: str) -> None:
    with pytest.raises(InvalidField) as caught:
        configured(text)

    assert field == caught.value.field
    assert remedy in caught.value.remedy


def test_the_root_may_come_from_the_variable_of_nvidias_plugin() -> None:
    text = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"

    assert "/run/nvidia/mps" == configured(text, MPS_ROOT="/run/nvidia/mps").flags.mps_root
    with pytest.raises(InvalidField) as caught:
        configured(text, MPS_ROOT="mps")
    assert "MPS_ROOT" == caught.value.field
