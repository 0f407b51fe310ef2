"""Offers against a reference that asks of each device by itself what becomes of it."""

from fnmatch import fnmatchcase
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from serving_support import A100, L4, gpu, machine, nic

from topoalign.core.model.holdings import handed_out
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.plugin_config.file import interpret_document
from topoalign.plugin_config.resource_offers import offer_resources

NO_NAME = "no name has this"
PROFILES = st.none() | st.lists(st.sampled_from(["1g.10gb", "3g.40gb", "1c.3g.40gb", "1g.10gb+me"]), max_size=3)
NAMES = st.sampled_from(["nvidia.com/a", "nvidia.com/b", "nvidia.com/gpu"])


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    gpus = [gpu(i, draw(PROFILES), draw(st.sampled_from([A100, L4]))) for i in range(draw(st.integers(0, 5)))]
    if draw(st.booleans()):  # all alike, as `single` wants them
        gpus = [gpu(i, ["1g.10gb"] * draw(st.integers(1, 3))) for i in range(len(gpus))]
    return machine(gpus, [nic(i, draw(st.integers(0, 2))) for i in range(draw(st.integers(0, 3)))])


def outcomes(names: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda name: {"name": name}, names) | st.just({"exclude": True})


GPU_CHOICES = st.builds(
    lambda ways, outcome: {**ways, **outcome},
    st.sampled_from([{"pattern": "A100"}, {"pattern": "*"}, {"uuids": ["GPU-0", "GPU-2"]}, {"indexes": [1, 3]}]),
    outcomes(NAMES),
)
MIG_CHOICES = st.builds(
    lambda ways, outcome: {**ways, **outcome},
    st.sampled_from([{"pattern": "1g.*"}, {"pattern": "3g.40gb"}, {"uuids": ["MIG-0-0"]}]),
    outcomes(NAMES),
)
NIC_CHOICES = st.builds(
    lambda ways, outcome: {**ways, **outcome},
    st.sampled_from([{"names": ["mlx5_0"]}, {"names": ["mlx5_*"]}, {"pci": ["0000:01:*"]}]),
    st.just({"exclude": True}) | st.just({"name": "x.io/nic"}) | st.just({"name": "x.io/vf", "virtualFunctions": True}),
)
SHARED = st.fixed_dictionaries(
    {"name": st.sampled_from(["gpu", "a", "mig-1g.10gb", "topoalign.io/nic"]), "replicas": st.integers(1, 4)},
    optional={"devices": st.just("all") | st.integers(1, 4) | st.just([0, "0:1", "MIG-1-0", "GPU-2"])},
)


BY_MPS = st.fixed_dictionaries(
    {"name": st.sampled_from(["gpu", "a", "b"]), "replicas": st.integers(2, 4)},
    optional={"devices": st.just("all") | st.integers(1, 4) | st.just([0, "0:1", "MIG-1-0", "GPU-2"])},
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    shared = draw(st.lists(SHARED, max_size=3, unique_by=lambda each: each["name"]))
    by_mps = draw(st.lists(BY_MPS, max_size=2, unique_by=lambda each: each["name"]))
    gpus, mig = draw(st.lists(GPU_CHOICES, max_size=3)), draw(st.lists(MIG_CHOICES, max_size=2))
    of_instances = {each.get("name") for each in mig} - {"nvidia.com/gpu", *(each.get("name") for each in gpus)}
    refused = {*of_instances, *(f"nvidia.com/{each['name']}" for each in shared)}
    by_mps = [each for each in by_mps if f"nvidia.com/{each['name']}" not in refused]
    sections = {
        name: {"resources": resources, "renameByDefault": draw(st.booleans())}
        for name, resources in (("timeSlicing", shared), ("mps", by_mps))
        if resources
    }
    strategies = ["none", "single"] if by_mps else ["none", "single", "mixed"]
    return {
        "flags": {"migStrategy": draw(st.sampled_from(strategies)), "mpsRoot": "/run/nvidia/mps"},
        "resources": {
            "gpus": gpus,
            "mig": mig,
        },
        "nics": draw(st.lists(NIC_CHOICES, max_size=2)),
        "sharing": sections,
    }


def reference(topology: Topology, document: dict[str, Any]) -> dict[str, str]:
    """Handed-out id -> resource, one device after another, straight from the text of the rules."""
    strategy = document["flags"]["migStrategy"]
    mig_on = strategy != "none"
    usual: list[tuple[str, str, str]] = []  # id, resource, what else it may be called
    gpus = [(each, outcome_of_gpu(each, document)) for each in topology.gpus]
    kept = [(each, name) for each, name in gpus if name is not None]
    if strategy == "single" and any(each.mig is not None for each, _ in kept):
        kinds = {None if each.mig is None else tuple(sorted({i.profile for i in each.mig})) for each, _ in kept}
        if len(kinds) > 1 or () in kinds or any(kind is not None and len(kind) > 1 for kind in kinds):
            kept = []
    for each, name in kept:
        if not mig_on or each.mig is None:
            usual.append((each.id, name, str(each.index)))
            continue
        for instance in each.mig:
            chosen = next((c for c in document["resources"]["mig"] if fits_instance(c, instance)), None)
            if chosen is not None:
                resource = None if chosen.get("exclude") else chosen["name"]
            elif strategy == "single":
                resource = "nvidia.com/gpu"
            else:
                c_is_g = not instance.profile.startswith("1c.")
                resource = "nvidia.com/mig-" + instance.profile.replace("+", ".") if c_is_g else None
            if resource is not None:
                usual.append((instance.uuid, resource, f"{each.index}:{instance.index}"))
    for card in topology.nics:
        chosen = next((c for c in document["nics"] if fits_nic(c, card.id, card.pci or "")), None)
        if chosen is None:
            usual.append((card.id, "topoalign.io/nic", str(card.index)))
        elif chosen.get("virtualFunctions"):
            usual += [(function.pci, "x.io/vf", "") for function in card.virtual_functions]
        elif not chosen.get("exclude"):
            usual.append((card.id, "x.io/nic", str(card.index)))
    divided = {each.id for each in topology.gpus if each.mig is not None}
    divided |= {instance.uuid for each in topology.gpus for instance in each.mig or ()}
    return shared_out(usual, document["sharing"], divided)


def outcome_of_gpu(each: Gpu, document: dict[str, Any]) -> str | None:
    for choice in document["resources"]["gpus"]:
        if (
            fnmatchcase(each.name, f"*{choice.get('pattern', NO_NAME)}*")
            or each.id in choice.get("uuids", [])
            or each.index in choice.get("indexes", [])
        ):
            return None if choice.get("exclude") else str(choice["name"])
    return "nvidia.com/gpu"


def fits_instance(choice: dict[str, Any], instance: Any) -> bool:
    return fnmatchcase(instance.profile, choice.get("pattern", NO_NAME)) or instance.uuid in choice.get("uuids", [])


def fits_nic(choice: dict[str, Any], name: str, pci: str) -> bool:
    return any(fnmatchcase(name, each) for each in choice.get("names", [])) or any(
        fnmatchcase(pci, each) for each in choice.get("pci", [])
    )


def shared_out(usual: list[tuple[str, str, str]], sharing: dict[str, Any], divided: set[Any]) -> dict[str, str]:
    """`divided`: GPUs in MIG mode and their instances, which MPS does not share."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    asked = [(way, sharing[way]["renameByDefault"], share) for way in sharing for share in sharing[way]["resources"]]
    for device, resource, reference_ in usual:
        place = seen[resource] = seen.get(resource, -1) + 1
        for way, renamed, share in asked:
            name = share["name"] if "/" in share["name"] else f"nvidia.com/{share['name']}"
            devices = share.get("devices", "all")
            mine = (
                devices == "all"
                or (isinstance(devices, int) and place < devices)
                or (isinstance(devices, list) and {device, reference_} & {str(each) for each in devices})
            )
            if name == resource and mine:
                if way == "mps" and device in divided:
                    break
                called = f"{name}.shared" if renamed else name
                whole = share["replicas"] == 1
                found |= {device if whole else f"{device}::{n}": called for n in range(share["replicas"])}
                break
        else:
            found[device] = resource
    return found


@given(machines(), documents())
def test_offers_are_what_each_device_by_itself_becomes(topology: Topology, document: dict[str, Any]) -> None:
    """So every device is accounted for: offered once, under one resource, whole or in parts, or left out for a reason."""
    found = offer_resources(topology, interpret_document(document, {}).configuration).offers
    handed = [
        (device, offer.resource)
        for offer in found
        for base in offer.devices
        for device in handed_out(base, offer.replicas)
    ]

    assert reference(topology, document) == dict(handed)
    assert len(dict(handed)) == len(handed)
    offered = msgspec.structs.replace(topology, offers=found)
    validate(offered)
    cards = [offered.parent_of(base) for offer in found for base in offer.devices if base in offered.parents]
    wholes = {base for offer in found for base in offer.devices if base not in offered.parents}
    assert set() == wholes & set(cards)
    by_mps = {name_of(each) for each in document["sharing"].get("mps", {}).get("resources", [])}
    assert {offer.resource.removesuffix(".shared") for offer in found if offer.sharing == "mps"} <= by_mps
    assert all(offer.most == 1 for offer in found if offer.sharing == "mps")


def name_of(share: dict[str, Any]) -> str:
    return f"nvidia.com/{share['name']}"


@given(machines(), machines(), documents())
def test_what_stays_under_single_was_offered_before_and_is_still_there(
    before: Topology, now: Topology, document: dict[str, Any]
) -> None:
    document["flags"]["migStrategy"] = "single"
    configuration = interpret_document(document, {}).configuration
    had = offer_resources(before, configuration).offers
    fresh, found = offer_resources(now, configuration), offer_resources(now, configuration, had)

    if not any(finding.severe and finding.field == "flags.migStrategy" for finding in found.findings):
        assert fresh.offers == found.offers
        return
    bases = {base for offer in found.offers for base in offer.devices} - {nic.id for nic in now.nics}
    parts = {function.pci for nic in now.nics for function in nic.virtual_functions}
    assert bases - parts <= {base for offer in had for base in offer.devices}
    assert bases - parts <= {*now.gpu_by_id, *now.parents}
