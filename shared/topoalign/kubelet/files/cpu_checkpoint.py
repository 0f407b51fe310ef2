"""
Reads the kubelet's file with the CPUs of each container: `cpu_manager_state`.

It contains the shared pool and the exclusive CPUs of containers. With the static policy, the two together are the
machine's CPUs (except reserved ones under strict-cpu-reservation). If they are not, the kubelet rejects the file when
it starts, and so does this reader.

Source: kubelet v1.36.3, cm/cpumanager/state and the static policy's check of its state.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.model.errors import clean, quoted
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import checkpoint
from topoalign.kubelet.files.checkpoint import Envelope, damaged_file

NAME = "cpu_manager_state"


class CpuManagerState(Envelope, frozen=True, kw_only=True, rename="camel"):
    """The file."""

    policy_name: str
    default_cpu_set: str
    entries: dict[str, dict[str, str]] | None = {}
    """Pod uid -> container -> CPUs."""

    @property
    def shared(self) -> frozenset[int]:
        """The CPUs of the shared pool."""
        return parse_cpuset(self.default_cpu_set)

    @property
    def exclusive(self) -> dict[tuple[str, str], frozenset[int]]:
        """(pod UID, container) -> its exclusive CPUs."""
        return {
            (uid, container): parse_cpuset(cpus)
            for uid, containers in (self.entries or {}).items()
            for container, cpus in containers.items()
        }


DECODER = msgspec.json.Decoder(CpuManagerState)


def load_cpu_state(root: Path) -> CpuManagerState | None:
    """Reads the state of the kubelet with this root directory; None without a file. Raises StateFault."""
    content = checkpoint.read_checkpoint_file(root / NAME)
    return None if content is None else decode_cpu_checkpoint(content)


def decode_cpu_checkpoint(content: bytes) -> CpuManagerState:
    """Decodes the file. Raises StateFault for an invalid checkpoint or a wrong checksum."""
    state = checkpoint.decode_checkpoint(NAME, content, DECODER)
    if state.checksum:
        checkpoint.expect_checksum(NAME, state.checksum, spew_cpu_state(state))
    try:
        _ = state.shared, state.exclusive
    except ValueError as error:
        raise damaged_file(NAME, clean(str(error), 200)) from error
    return state


def spew_cpu_state(state: CpuManagerState) -> Iterator[str]:
    """The data as go-spew prints it, with the structs of all releases."""
    entries = checkpoint.spew_value(state.entries)
    pod_level = " PodEntries:(state.PodCPUAssignments)map[]"
    for version, more in (("", ""), ("V2", ""), ("", pod_level), ("V3", pod_level)):
        yield (
            f"(*state.CPUManagerCheckpoint{version}){{PolicyName:(string){state.policy_name} "
            f"DefaultCPUSet:(string){state.default_cpu_set} Entries:(map[string]map[string]string){entries}{more} "
            "Checksum:(checksum.Checksum)0}"
        )


def check_cpu_state(state: CpuManagerState, topology: Topology, rules: AdmissionRules) -> None:
    """
    Raises StateFault if this cannot be the state of a kubelet with these rules on this machine, and NoFit if the CPUs
    cannot be reserved.
    """
    if state.policy_name != rules.cpu_manager:
        finding = f"it was kept under policy {quoted([state.policy_name])}, and {rules.cpu_manager!r} is configured"
        raise damaged_file(NAME, finding)
    if rules.cpu_manager == "none" or not (state.shared or state.exclusive):
        return  # nothing is allocated; at its next start, the kubelet fills the pool
    given: dict[int, str] = {}
    for (uid, _), cpus in state.exclusive.items():
        if taken := [cpu for cpu in cpus if given.setdefault(cpu, uid) != uid]:
            raise damaged_file(NAME, f"CPUs {format_cpuset(taken)} belong to two pods")
    if both := state.shared & given.keys():
        raise damaged_file(NAME, f"CPUs {format_cpuset(both)} are in the shared pool and belong to a container")
    reserved = read_reserved_cpus(topology, rules)
    strict = CpuOption.STRICT_RESERVATION in rules.cpu_options
    if misplaced := reserved & state.shared if strict else reserved - state.shared:
        where = "in" if strict else "not in"
        raise damaged_file(NAME, f"CPUs {format_cpuset(misplaced)} are kept for the system and {where} the shared pool")
    online = frozenset(topology.cpu_topology.node_of)
    named = state.shared | given.keys() | (reserved if strict else frozenset())
    if foreign := named - online:
        raise damaged_file(NAME, f"it names CPUs {format_cpuset(foreign)}, which the machine does not have")
    if unnamed := online - named:
        raise damaged_file(NAME, f"CPUs {format_cpuset(unnamed)} stand neither in the shared pool nor with a container")
