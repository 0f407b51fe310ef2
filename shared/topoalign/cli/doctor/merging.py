"""
An estimate of the kubelet's merge of hints on this machine, for a container that asks for every resource.

It is computed from files alone: the NUMA nodes, the sizes of hugepages, the kubelet's configuration, and the resources in
its checkpoint.
"""

from topoalign.cli.doctor.check_results import CheckResult, Subject, ok, warning_finding
from topoalign.cli.doctor.kubelets import numa_node_count, read_kubelet_rules, registered_devices
from topoalign.core.model.ids import CPU, MEMORY, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.cost import longest, warn_of_combinations

REMEDY = (
    "ask for fewer resources in one container, use policy single-numa-node, which merges hints of single NUMA nodes alone, "
    "or a firmware setting with fewer NUMA nodes (NPS, SNC)"
)


def kubelet_merge(subject: Subject) -> CheckResult | None:
    """
    Only where the kubelet's configuration and the NUMA nodes are known, and the kubelet would start with them. The devices
    of a resource are taken to be on as many NUMA nodes as they can.
    """
    rules = read_kubelet_rules(subject)
    nodes = numa_node_count(subject)
    if rules is None or nodes is None or not POLICIES[rules.policy].asks or nodes > rules.max_allowable_numa_nodes:
        return None
    on_nodes = count_resource_nodes(subject, rules, nodes)
    found = warn_of_combinations({name: longest(few, rules.policy) for name, few in on_nodes.items()})
    if found is not None:
        return warning_finding(f"for a container that asks for everything {found}", REMEDY)
    return ok(f"{len(on_nodes)} resources on {nodes} NUMA nodes are merged without delay")


def count_resource_nodes(subject: Subject, rules: AdmissionRules, nodes: int) -> dict[ResourceName, int]:
    """Resource -> on how many NUMA nodes it may be."""
    found = {}
    for name, devices in registered_devices(subject).items():
        if devices:
            found[ResourceName(name)] = min(nodes, len(devices))
    if rules.cpu_manager == "static":
        found[CPU] = nodes
    if rules.memory_manager == "Static":
        found[MEMORY] = nodes
        found.update(dict.fromkeys(list_hugepages(subject), nodes))
    return found


def list_hugepages(subject: Subject) -> list[ResourceName]:
    """The sizes of which some NUMA node has pages."""
    from topoalign.machines.reader_rules import hugepages_resource  # brings in the readers of machines

    sizes = set()
    for file in (subject.sysfs_root / "devices/system/node").glob("node*/hugepages/hugepages-*kB/nr_hugepages"):
        try:
            if int(file.read_text()):
                sizes.add(int(file.parent.name.removeprefix("hugepages-").removesuffix("kB")))
        except (OSError, ValueError):
            continue
    return [hugepages_resource(kib << 10) for kib in sorted(sizes)]
