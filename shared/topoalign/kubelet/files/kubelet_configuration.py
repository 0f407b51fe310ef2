"""
Reads the rules of a kubelet's decisions from its configuration file.

Only fields that affect a decision are read; the hundreds of other fields are ignored. A missing field has the kubelet's
own default. A configuration with which the kubelet would not start is an error here, because no decision can be
predicted from it: an unknown option, an alpha option whose gate is off, a static policy with nothing reserved.

Source: kubelet v1.36.3, KubeletConfiguration v1beta1 and the start of the topology, CPU and memory managers. Flags on
the kubelet's command line and drop-in files (`--config-dir`) take precedence over the file; the answer of `/configz` has
them merged. `configuration_file` finds the configuration in a file.
"""

from math import ceil
from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode, Placement, Policy, Scope
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.kubelet.files import configuration_file, documents, resource_quantities
from topoalign.kubelet.files.configuration_file import API_VERSION, KIND

TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
"""The values that Go's strconv.ParseBool accepts."""

GATES = {
    CpuOption.ALIGN_BY_SOCKET: ("CPUManagerPolicyAlphaOptions", "AllAlpha", False),
    CpuOption.DISTRIBUTE_ACROSS_CORES: ("CPUManagerPolicyAlphaOptions", "AllAlpha", False),
    CpuOption.DISTRIBUTE_ACROSS_NUMA: ("CPUManagerPolicyBetaOptions", "AllBeta", True),
}
"""
Option -> its feature gate, the gate of all features of its stage, and whether it is on by default. All other options are
stable, as are all options of the Topology Manager.
"""

CLOSEST = "prefer-closest-numa-nodes"
MOST_NODES = "max-allowable-numa-nodes"
MOST_NODE_ID = 65_535


class MemoryReservation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Memory and hugepages of one NUMA node that are reserved for the system."""

    numa_node: int = 0
    limits: dict[str, str | int | float]


class KubeletConfiguration(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields that affect a decision."""

    feature_gates: dict[str, bool] = {}
    topology_manager_policy: Policy = Policy.NONE
    topology_manager_scope: Scope = Scope.CONTAINER
    topology_manager_policy_options: dict[str, str] = {}
    cpu_manager_policy: Literal["none", "static"] = "none"
    cpu_manager_policy_options: dict[str, str] = {}
    reserved_system_cpus: str = msgspec.field(name="reservedSystemCPUs", default="")
    system_reserved: dict[str, str] = {}
    kube_reserved: dict[str, str] = {}
    memory_manager_policy: Literal["None", "Static"] = "None"
    reserved_memory: list[MemoryReservation] = []


def load_configuration(path: Path, placement: Placement = Placement.TOPOLOGY) -> AdmissionRules:
    """The rules in a file. Raises the errors of `load_with_note`."""
    return load_with_note(path, placement)[0]


def load_with_note(path: Path, placement: Placement = Placement.TOPOLOGY) -> tuple[AdmissionRules, str | None]:
    """The rules in a file, and a note if they are in a field of it. Raises NotFound, InvalidDocument, InvalidField."""
    found = configuration_file.find_configuration(
        configuration_file.mappings_in(documents.read_bounded(path), str(path))
    )
    try:
        rules = rules_of(found.content, placement)
    except InvalidField as error:
        raise configuration_file.nested_error(found.field, error) from error
    return rules, f"the configuration of the kubelet was taken from {found.field}" if found.field else None


def rules_of(document: documents.Document, placement: Placement = Placement.TOPOLOGY) -> AdmissionRules:
    """The rules of a KubeletConfiguration. Raises InvalidField with the path of a value with which no kubelet starts."""
    if (document.get("kind"), document.get("apiVersion")) != (KIND, API_VERSION):
        raise documents.other_kind(document, KIND, API_VERSION, configuration_file.REMEDY)
    remedy = (
        "write it as KubeletConfiguration v1beta1 has it: cpuManagerPolicy none or static, memoryManagerPolicy None or "
        f"Static, topologyManagerPolicy {', '.join(Policy)}; numbers and booleans of options in quotes"
    )
    given = {field: value for field, value in document.items() if value != ""}  # empty text stands for the default
    found: KubeletConfiguration = documents.convert_document(given, KubeletConfiguration, remedy)
    policy = found.topology_manager_policy
    closest, most_nodes = topology_options(found) if policy is not Policy.NONE else (False, 8)
    rules = AdmissionRules(
        mode=Mode.KUBELET,
        placement=placement,
        policy=policy,
        scope=found.topology_manager_scope,
        prefer_closest_numa_nodes=closest,
        max_allowable_numa_nodes=most_nodes,
        cpu_manager=found.cpu_manager_policy,
        cpu_options=cpu_options(found),
        reserved_cpus=found.reserved_system_cpus,
        reserved_cpu_count=reserved_count(found),
        memory_manager=found.memory_manager_policy,
        reserved_memory=reserved_memory(found),
    )
    check_rules(rules)
    return rules


def parse_go_boolean(field: str, text: str) -> bool:
    """The value of a Go boolean as text. Raises InvalidField."""
    if text not in TRUE | FALSE:
        raise InvalidField(field, f"{quoted([text])} is no boolean", 'use "true" or "false"')
    return text in TRUE


def topology_options(found: KubeletConfiguration) -> tuple[bool, int]:
    """prefer-closest-numa-nodes and max-allowable-numa-nodes. Not called under policy none, as in the kubelet."""
    closest = False
    most_nodes = 8
    for name, text in sorted(found.topology_manager_policy_options.items()):
        field = f"topologyManagerPolicyOptions[{clean(name)}]"
        if name == CLOSEST:
            closest = parse_go_boolean(field, text)
        elif name == MOST_NODES:
            if not (digits := text.removeprefix("+")).isascii() or not digits.isdigit() or not int(digits[:9]) >= 8:
                raise InvalidField(field, f"{quoted([text])} is no whole number from 8 on", 'use "8" or more')
            most_nodes = int(digits[:9])
        else:
            known = f"the kubelet has {CLOSEST} and {MOST_NODES}"
            raise InvalidField(field, "an unknown option, with which the kubelet does not start", known)
    return closest, most_nodes


def cpu_options(found: KubeletConfiguration) -> frozenset[CpuOption]:
    """The CPU manager options that are on. An unknown or gated option is an error even if it is off."""
    chosen = set()
    for name, text in sorted(found.cpu_manager_policy_options.items()):
        field = f"cpuManagerPolicyOptions[{clean(name)}]"
        if name not in set(CpuOption):
            known = f"the kubelet has {', '.join(CpuOption)}"
            raise InvalidField(field, "an unknown option, with which the kubelet does not start", known)
        option = CpuOption(name)
        if option in GATES:
            gate, stage, is_on = GATES[option]
            if not found.feature_gates.get(gate, found.feature_gates.get(stage, is_on)):
                why = f"its feature gate {gate} is off, so the kubelet does not start"
                raise InvalidField(field, why, f"switch {gate} on in featureGates, or leave the option out")
        if parse_go_boolean(field, text):
            chosen.add(option)
    if found.cpu_manager_policy_options and found.cpu_manager_policy == "none":
        why = "options of a static policy together with policy none, with which the kubelet does not start"
        raise InvalidField("cpuManagerPolicyOptions", why, "set cpuManagerPolicy to static, or leave them out")
    return frozenset(chosen)


def reserved_count(found: KubeletConfiguration) -> int:
    """Number of reserved CPUs that the kubelet selects itself; 0 if they are listed, or under CPU policy none."""
    try:
        named = parse_cpuset(found.reserved_system_cpus)
    except ValueError as error:
        raise InvalidField("reservedSystemCPUs", clean(str(error)), "list CPUs as the kernel does: 0-3,8") from error
    total = 0
    for field, reserved in (("systemReserved", found.system_reserved), ("kubeReserved", found.kube_reserved)):
        if (text := reserved.get("cpu")) is not None:
            amount = resource_quantities.thousandths(text)
            if amount is None:
                raise InvalidField(f"{field}[cpu]", f"{quoted([text])} is no amount", "write 500m or 2")
            total += amount
    if named or found.cpu_manager_policy == "none":
        return 0
    count = ceil(total / 1000)
    if count == 0:
        why = "the static policy needs CPUs kept for the system; without, the kubelet does not start"
        raise InvalidField(
            "cpuManagerPolicy", why, f"set reservedSystemCPUs, or {CPU} in kubeReserved or systemReserved"
        )
    return count


def reserved_memory(found: KubeletConfiguration) -> dict[int, dict[ResourceName, int]]:
    """NUMA node -> resource -> reserved bytes. Raises InvalidField."""
    reserved: dict[int, dict[ResourceName, int]] = {}
    for position, entry in enumerate(found.reserved_memory):
        where = f"reservedMemory[{position}]"
        if not 0 <= entry.numa_node <= MOST_NODE_ID:
            raise InvalidField(
                f"{where}.numaNode", f"{entry.numa_node} is no NUMA node", "use the node's number, 0 or more"
            )
        for name, amount in entry.limits.items():
            field = f"{where}.limits[{clean(name)}]"
            resource = ResourceName(name)
            size = resource_quantities.whole(str(amount))
            if resource != MEMORY and not is_hugepages(resource):
                raise InvalidField(field, "neither memory nor hugepages", "reserve memory or hugepages-<size> here")
            if not size:
                raise InvalidField(
                    field, f"{quoted([str(amount)])} is no amount above 0", "write 1Gi or a number of bytes"
                )
            if resource in reserved.setdefault(entry.numa_node, {}):
                raise InvalidField(field, "the node has it already", "name each resource of a node once")
            reserved[entry.numa_node][resource] = size
    static = found.memory_manager_policy == "Static"
    if static and not any(MEMORY in amounts for amounts in reserved.values()):
        why = "the static policy needs memory kept for the system; without, the kubelet does not start"
        raise InvalidField("memoryManagerPolicy", why, "list the amounts of each NUMA node in reservedMemory")
    return reserved if static else {}
