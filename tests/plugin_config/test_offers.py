"""What a node offers by a configuration."""

import msgspec
import pytest
from serving_support import A100, L4, gpu, listed, machine, made, nic, said

from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.model.topology.model import Gpu
from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines import catalogue, load_machine
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.resource_offers import offer_resources

MIXED, SINGLE = "flags: {migStrategy: mixed}\n", "flags: {migStrategy: single}\n"
SHARE = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2"


def test_without_a_configuration_gpus_and_nics_are_offered_as_they_are() -> None:
    for name in catalogue.names():
        topology = load_machine(name).topology

        assert topology.offered == offer_resources(topology, Configuration()).offers
    assert () == made(machine()).offers


def test_gpus_in_units_are_offered_as_computing_time_and_memory() -> None:
    """Blocks are rounded down GPU by GPU, and a GPU in MIG mode stays as it is."""
    sizes = (1 << 30, 1 << 30, (1 << 30) + (300 << 20), 1 << 30, None)
    gpus = [
        msgspec.structs.replace(gpu(index, [] if index == 3 else None), memory=size) for index, size in enumerate(sizes)
    ]

    found = made(machine(gpus), "sharing: {units: {devices: ['1', GPU-2, '3', '4'], memory: example.com/blocks}}")

    assert [
        ("nvidia.com/gpu", ("GPU-0", "GPU-3", "GPU-4"), 1, None),
        ("tencent.com/vcuda-core", ("GPU-1", "GPU-2"), 100, "cores"),
        ("example.com/blocks", ("GPU-1",), 4, "memory"),
        ("example.com/blocks", ("GPU-2",), 5, "memory"),
    ] == [(each.resource, each.devices, each.replicas, each.unit) for each in found.offers]
    assert {"flags.migStrategy", "sharing.units"} == {finding.field for finding in found.findings}
    validate(msgspec.structs.replace(machine(gpus), offers=found.offers))


def test_units_with_a_limiter_say_which_and_are_not_warned_of() -> None:
    node, flags = machine([msgspec.structs.replace(gpu(0), memory=1 << 30)]), "flags: {vcudaRoot: /run/vcuda}\n"
    plain, limited = (
        made(node, f"{flags}sharing: {{units: {{}}, limiter: {limiter}}}") for limiter in ("none", "vcuda")
    )

    assert [["none", "none"], ["vcuda", "vcuda"]] == [
        [each.limiter for each in found.offers] for found in (plain, limited)
    ]
    assert ["limiter: none" in said(found)[-1] if said(found) else False for found in (plain, limited)] == [True, False]


def test_gpus_in_slots_are_offered_with_the_names_of_amounts() -> None:
    """A GPU in MIG mode, or without a known memory, would be in one resource with slots: it is not offered."""
    sizes = (1 << 30, 1 << 30, 1 << 30, None)
    gpus = [
        msgspec.structs.replace(gpu(index, [] if index == 1 else None), memory=size) for index, size in enumerate(sizes)
    ]
    text = "resources: {gpus: [{indexes: [2], name: whole}]}\nsharing: {slots: {memory: mem, coreScaling: 1.5}}"

    found = made(machine(gpus), text)

    terms = Slots(memory=ResourceName("nvidia.com/mem"), core_scaling=1.5)
    assert [("nvidia.com/gpu", ("GPU-0",), 10, terms, "none"), ("nvidia.com/whole", ("GPU-2",), 1, None, None)] == [
        (each.resource, each.devices, each.replicas, each.slots, each.limiter) for each in found.offers
    ]
    assert [True, True] == [finding.severe for finding in found.findings if "not offered" in finding.finding]
    validate(msgspec.structs.replace(machine(gpus), offers=found.offers))


def test_mig_instances_in_slots_are_offered_by_single_and_mixed() -> None:
    """Under `none` a GPU in MIG mode is whole, and one resource would have slots and whole GPUs."""
    node = machine([gpu(0, ["1g.10gb", "1g.10gb"]), gpu(1, ["1g.10gb"])])
    small = "sharing: {slots: {name: mig-1g.10gb, replicas: 2}}"

    single, mixed = made(node, f"{SINGLE}sharing: {{slots: {{replicas: 2}}}}"), made(node, f"{MIXED}{small}")
    none = made(node, "sharing: {slots: {}}")

    ids = [f"MIG-{at}::{number}" for at in ("0-0", "0-1", "1-0") for number in range(2)]
    assert {"nvidia.com/gpu": ids} == listed(single)
    assert {"nvidia.com/mig-1g.10gb": ids} == listed(mixed)
    assert {} == listed(none)
    assert [Slots()] == [each.slots for each in single.offers]
    assert ["2 devices of nvidia.com/gpu are in MIG mode: not offered"] == [
        each.finding for each in none.findings if each.severe
    ]
    validate(msgspec.structs.replace(node, offers=mixed.offers))


def test_gpus_in_mig_mode_are_in_slots_that_become_instances() -> None:
    """Where the driver tells profiles and places; others are not offered, and the reason is told."""
    one = MigProfile(name="1g.10gb", memory=10 << 30, slices=1, cores=15, placements=(MigPlacement(start=0, size=1),))
    told, hidden, whole = gpu(0, []), gpu(1, []), gpu(2)
    gpus = [msgspec.structs.replace(told, mig_profiles=(one,)), hidden, whole]

    found = made(machine(gpus), "flags: {migStrategy: dynamic}\nsharing: {slots: {replicas: 7}}")

    assert {"nvidia.com/gpu": [f"GPU-0::{number}" for number in range(7)]} == listed(found)
    assert [(Slots(instances=True), None)] == [(each.slots, each.limiter) for each in found.offers]
    assert ["do not report where", "are not in MIG mode"] == [
        part for part in ("do not report where", "are not in MIG mode") if any(part in each for each in said(found))
    ]
    assert all(each.remedy for each in found.findings if each.severe)
    validate(msgspec.structs.replace(machine(gpus), offers=found.offers))


@pytest.mark.parametrize(
    ("profile", "more", "why"),
    [
        (
            "1g.10gb",
            "flags: {migStrategy: single, hamiRoot: /hami}\nsharing: {slots: {}, limiter: hami-core}",
            "HAMi-core",
        ),
        ("1c.3g.40gb", f"{SINGLE}sharing: {{slots: {{}}}}", "share the memory"),
    ],
)
def test_instances_without_limits_of_their_own_are_not_in_slots(profile: str, more: str, why: str) -> None:
    """HAMi-core limits none, and of one with a part of its slice's compute units the memory is not its own."""
    found = made(machine([gpu(0, [profile])]), more)

    assert {} == listed(found)
    assert [True] == [why in each.finding for each in found.findings if each.severe]
    assert all(each.remedy for each in found.findings if each.severe)


def test_slots_with_a_limiter_say_which_and_units_beside_them_have_none() -> None:
    node = machine([msgspec.structs.replace(gpu(number), memory=1 << 30) for number in range(2)])
    named = "resources: {gpus: [{indexes: [1], name: other}]}\n"
    sharing = "sharing: {slots: {}, units: {name: nvidia.com/other}, limiter: hami-core}"
    found = made(node, f"{named}flags: {{hamiRoot: /hami}}\n{sharing}")

    assert {"nvidia.com/gpu": "hami-core", "tencent.com/vcuda-core": "none", "tencent.com/vcuda-memory": "none"} == {
        str(each.resource): each.limiter for each in found.offers
    }
    assert ["sharing.units"] == [text.partition(":")[0] for text in said(found) if "limiter: none" in text]


def test_units_of_a_resource_that_the_node_does_not_have_are_none() -> None:
    found = made(machine([gpu(0)]), "sharing: {units: {name: nvidia.com/large}}")

    assert {"nvidia.com/gpu": ["GPU-0"]} == listed(found)
    assert ["sharing.units: this node has no nvidia.com/large"] == said(found)


def test_mig_is_ignored_where_nothing_asks_for_it_and_that_is_said() -> None:
    found = made(machine([gpu(0), gpu(1, ["1g.10gb"]), gpu(2, [])]))

    assert {"nvidia.com/gpu": ["GPU-0", "GPU-1", "GPU-2"]} == listed(found)
    assert ["flags.migStrategy: none offers GPUs that are in MIG mode as a whole: GPU 1, GPU 2"] == said(found)


def test_mixed_makes_each_profile_a_resource_and_warns_of_empty_gpus() -> None:
    """Strategy `mixed` makes each profile a resource, and only warns about a GPU without instances."""
    found = made(machine([gpu(0), gpu(1, ["1g.10gb", "3g.40gb", "1g.10gb+me"]), gpu(2, [])]), MIXED)

    assert {
        "nvidia.com/gpu": ["GPU-0"],
        "nvidia.com/mig-1g.10gb": ["MIG-1-0"],
        "nvidia.com/mig-3g.40gb": ["MIG-1-1"],
        "nvidia.com/mig-1g.10gb.me": ["MIG-1-2"],
    } == listed(found)
    assert [("flags.migStrategy", False)] == [(finding.field, finding.severe) for finding in found.findings]
    assert "GPU 2 is in MIG mode and has no instance" in said(found)[0]


def test_mixed_leaves_out_partial_compute_instances_unless_named() -> None:
    """`mixed` leaves out an instance with a part of its slice's compute units, unless an entry names it."""
    topology = machine([gpu(0, ["1c.3g.40gb", "3g.40gb"])])
    named = made(topology, MIXED + "resources: {mig: [{pattern: 1c.*, name: slice}]}")

    assert {"nvidia.com/mig-3g.40gb": ["MIG-0-1"]} == listed(made(topology, MIXED))
    assert {"nvidia.com/slice": ["MIG-0-0"], "nvidia.com/mig-3g.40gb": ["MIG-0-1"]} == listed(named)


def test_single_calls_equal_instances_gpus() -> None:
    found = made(machine([gpu(0, ["3g.40gb"] * 2), gpu(1, ["3g.40gb"])]), SINGLE)

    assert {"nvidia.com/gpu": ["MIG-0-0", "MIG-0-1", "MIG-1-0"]} == listed(found)
    assert () == found.findings


def test_single_offers_whole_gpus_where_none_is_in_mig_mode() -> None:
    assert {"nvidia.com/gpu": ["GPU-0", "GPU-1"]} == listed(made(machine([gpu(0), gpu(1)]), SINGLE))


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([gpu(0, ["1g.10gb"]), gpu(1)], "GPU 1 has no MIG instance"),
        ([gpu(0, ["1g.10gb"]), gpu(1, [])], "GPU 1 has no MIG instance"),
        ([gpu(0, ["1g.10gb"]), gpu(1, ["3g.40gb"])], "there are instances of '1g.10gb', '3g.40gb'"),
    ],
)
def test_single_with_unlike_gpus_offers_no_gpu_and_says_loudly_why(gpus: list[Gpu], why: str) -> None:
    """The NICs stay: they are not in question."""
    found = made(machine(gpus, [nic(0)]), SINGLE)
    (severe,) = [finding for finding in found.findings if finding.severe]

    assert {"topoalign.io/nic": ["mlx5_0"]} == listed(found)
    assert f"single needs all GPUs alike, and {why}: meanwhile no GPU is offered" == severe.finding


def test_single_goes_on_with_what_it_offered_when_gpus_become_unlike() -> None:
    """A GPU that comes back from a reset without its instances takes nobody else's along; nothing new is offered beside."""
    before = made(machine([gpu(0, ["1g.10gb"] * 2), gpu(1, ["1g.10gb"])]), SINGLE).offers
    now = machine([gpu(0, ["1g.10gb"] * 3), gpu(1, [])])

    assert {"nvidia.com/gpu": ["MIG-0-0", "MIG-0-1"]} == listed(made(now, SINGLE, before))
    assert "2 devices that were offered before stay so" in " ".join(said(made(now, SINGLE, before)))


def test_excluded_gpus_do_not_count_for_single() -> None:
    text = SINGLE + "resources: {gpus: [{indexes: [1], exclude: true}]}"

    assert {"nvidia.com/gpu": ["MIG-0-0"]} == listed(made(machine([gpu(0, ["1g.10gb"]), gpu(1)]), text))


def test_gpus_are_chosen_by_model_uuid_or_index_first_match_wins() -> None:
    """GPUs are selected by model, uuid or index, and the first entry that matches decides."""
    text = """
resources:
  gpus:
    - {uuids: [GPU-1], exclude: true}
    - {indexes: [0], name: debug}
    - {pattern: A100*80GB, name: example.com/a100}
    - {pattern: "*", name: gpu}
"""
    found = made(machine([gpu(0), gpu(1), gpu(2), gpu(3, name=L4)]), text)

    assert {"nvidia.com/debug": ["GPU-0"], "example.com/a100": ["GPU-2"], "nvidia.com/gpu": ["GPU-3"]} == listed(found)
    assert () == found.findings


def test_an_entry_without_a_match_is_a_finding_others_keep_their_name() -> None:
    """An entry that selects nothing is a finding, and devices without a matching entry keep their resource."""
    text = """
resources:
  gpus:
    - {pattern: H100, name: h100}
    - {uuids: [GPU-7, GPU-0], name: zero}
    - {indexes: [9], name: nine}
    - {pattern: A100, name: a}
nics: [{names: [mlx5_9], name: fast}]
"""
    found = made(machine([gpu(0, name=L4), gpu(1, name=L4)], [nic(0)]), text)

    assert {"nvidia.com/zero": ["GPU-0"], "nvidia.com/gpu": ["GPU-1"], "topoalign.io/nic": ["mlx5_0"]} == listed(found)
    assert [
        "resources.gpus[0]: decides for no GPU of this node",
        "resources.gpus[2]: decides for no GPU of this node",
        "resources.gpus[3]: decides for no GPU of this node",
        "nics[0]: decides for no NIC of this node",
    ] == said(found)


def test_shares_are_numbered_and_may_have_another_name() -> None:
    topology = machine([gpu(0), gpu(1)])
    shares = ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]

    assert {"nvidia.com/gpu": shares} == listed(made(topology, SHARE + "}]}}"))
    assert {"nvidia.com/cheap": shares} == listed(made(topology, SHARE + ", rename: cheap}]}}"))
    assert {"nvidia.com/gpu.shared": shares} == listed(made(topology, SHARE + "}], renameByDefault: true}}"))
    assert [None] == [offer.most for offer in made(topology, SHARE + "}]}}").offers]
    assert [1] == [offer.most for offer in made(topology, SHARE + "}], failRequestsGreaterThanOne: true}}").offers]


@pytest.mark.parametrize(
    ("devices", "shared", "finding"),
    [
        ("all", [0, 1, 2], None),
        ("2", [0, 1], None),
        ("5", [0, 1, 2], "there are 3, and 5 are asked for"),
        ("[2, GPU-0]", [0, 2], None),
        ("['1', 7, GPU-9]", [1], "this node has no nvidia.com/gpu '7', 'GPU-9'"),
    ],
)
def test_some_of_the_gpus_are_shared_and_the_others_stay_whole(
    devices: str, shared: list[int], finding: str | None
) -> None:
    found = made(machine([gpu(0), gpu(1), gpu(2)]), SHARE + f", rename: small, devices: {devices}}}]}}}}")
    whole = [f"GPU-{i}" for i in range(3) if i not in shared]

    assert [f"GPU-{i}::{n}" for i in shared for n in (0, 1)] == listed(found)["nvidia.com/small"]
    assert whole == listed(found).get("nvidia.com/gpu", [])
    assert ([f"sharing.timeSlicing.resources[0].devices: {finding}"] if finding else []) == said(found)


def test_mig_instances_are_shared_like_gpus() -> None:
    text = MIXED + "sharing: {timeSlicing: {resources: [{name: mig-1g.10gb, replicas: 2, devices: ['0:0', MIG-1-0]}]}}"
    found = made(machine([gpu(0, ["3g.40gb", "1g.10gb"]), gpu(1, ["1g.10gb"]), gpu(2, ["1g.10gb"])]), text)

    assert {
        "nvidia.com/mig-3g.40gb": ["MIG-0-0"],
        "nvidia.com/mig-1g.10gb": ["MIG-0-1::0", "MIG-0-1::1", "MIG-1-0::0", "MIG-1-0::1", "MIG-2-0"],
    } == listed(found)


def test_an_instance_is_called_by_the_index_that_nvml_has_for_it() -> None:
    """Others have made way: the second that is left is the one that nvidia-smi calls 0:5."""
    left = tuple(
        msgspec.structs.replace(instance, index=index)
        for instance, index in zip(gpu(0, ["1g.10gb"] * 2).mig or (), (2, 5), strict=True)
    )
    topology = machine([msgspec.structs.replace(gpu(0), mig=left)])
    text = MIXED + "sharing: {timeSlicing: {resources: [{name: mig-1g.10gb, replicas: 2, devices: ['0:1', '0:5']}]}}"
    found = made(topology, text)

    assert {"nvidia.com/mig-1g.10gb": ["MIG-0-0", "MIG-0-1::0", "MIG-0-1::1"]} == listed(found)
    assert ["sharing.timeSlicing.resources[0].devices: this node has no nvidia.com/mig-1g.10gb '0:1'"] == said(found)


def test_an_instance_whose_index_is_not_known_is_not_called_by_a_guess() -> None:
    unknown = tuple(msgspec.structs.replace(each, index=None) for each in gpu(0, ["1g.10gb"]).mig or ())
    topology = machine([msgspec.structs.replace(gpu(0), mig=unknown)])
    text = MIXED + "sharing: {timeSlicing: {resources: [{name: mig-1g.10gb, replicas: 2, devices: ['0:0']}]}}"

    assert {"nvidia.com/mig-1g.10gb": ["MIG-0-0"]} == listed(made(topology, text))


def test_parts_are_packed_if_configured_and_whole_gpus_never() -> None:
    """Parts of GPUs are packed if the configuration says so; whole GPUs are not."""
    text = "flags: {migStrategy: mixed, plugin: {sharedDevicesAllocationPolicy: packed}}\n"
    topology = machine([gpu(0), gpu(1, ["1g.10gb"])])

    assert ["distributed", "packed"] == [offer.packing for offer in made(topology, text).offers]
    assert ["packed", "packed"] == [offer.packing for offer in made(topology, text + SHARE + "}]}}").offers]


def test_a_resource_that_this_node_has_not_is_said_and_shared_nowhere() -> None:
    found = made(machine([gpu(0)]), "sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 3}]}}")

    assert {"nvidia.com/gpu": ["GPU-0"]} == listed(found)
    assert ["sharing.timeSlicing.resources[0]: this node has no nvidia.com/mig-1g.5gb"] == said(found)


def test_virtual_functions_are_offered_in_place_of_their_nic() -> None:
    text = """
nics:
  - {names: ["mlx5_[0]"], exclude: true}
  - {names: [mlx5_0, mlx5_1], name: rdma-vf, virtualFunctions: true}
  - {pci: ["0000:02:*"], name: example.com/storage}
  - {names: ["mlx5_3"], exclude: true}
"""
    found = made(machine(nics=[nic(0, 2), nic(1), nic(2), nic(3), nic(4)]), text)

    assert {
        "topoalign.io/rdma-vf": ["0000:00:00.1", "0000:00:00.2"],
        "example.com/storage": ["mlx5_2"],
        "topoalign.io/nic": ["mlx5_4"],
    } == listed(found)
    assert ["nics[1]: mlx5_1 has no virtual function: not offered", "nics[0]: decides for no NIC of this node"] == said(
        found
    )


def test_a_pattern_for_addresses_matches_no_nic_without_an_address() -> None:
    nics = [nic(0), msgspec.structs.replace(nic(1), pci=None)]

    found = made(machine(nics=nics), 'nics: [{pci: ["*"], exclude: true}]')

    assert ["mlx5_1"] == listed(found)["topoalign.io/nic"]


def test_more_shares_than_a_node_can_list_are_not_offered_and_that_is_loud() -> None:
    topology = machine([gpu(index) for index in range(128)], [nic(0)])
    found = made(topology, SHARE.replace("replicas: 2", "replicas: 1024") + "}]}}")

    assert {"topoalign.io/nic": ["mlx5_0"]} == listed(found)
    assert [True] == [finding.severe for finding in found.findings]


def test_offers_hang_together_on_every_machine_of_the_catalogue() -> None:
    text = MIXED + SHARE + "}]}}"
    for name in catalogue.names():
        topology = load_machine(name).topology
        validate(msgspec.structs.replace(topology, offers=made(topology, text).offers))


def test_foreign_text_is_made_fit_to_show() -> None:
    found = made(machine([gpu(0, ["1g\x1b[31m"], name=A100)]), MIXED)

    assert () == found.offers
    assert "\x1b" not in " ".join(said(found))


def test_an_offer_is_equal_however_often_it_is_made() -> None:
    topology = machine([gpu(0), gpu(1, ["1g.10gb"])], [nic(0, 2)])
    first: tuple[Offer, ...] = made(topology, MIXED + SHARE + "}]}}").offers

    assert first == made(topology, MIXED + SHARE + "}]}}", first).offers
