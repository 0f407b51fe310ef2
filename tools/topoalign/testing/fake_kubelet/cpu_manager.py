"""
The CPU manager of the fake kubelet: the exclusive CPUs of containers, and its file.

It drops CPUs of pods that are gone when it is asked for hints, when it allocates, and every 10 s. Each change is two
writes of the file, as upstream makes them; between the two, the CPUs are missing from the file. The decision which CPUs
a container gets is made by `topoalign.core`.

Source: kubelet v1.36.3, cm/cpumanager (`removeStaleState`, `allocateCPUs`, `RemoveContainer`).
"""

from collections.abc import Callable
from pathlib import Path

from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.model.errors import NoFit
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import cpu_checkpoint
from topoalign.testing.fake_kubelet.files import cpu_file, nothing, replace

RECONCILE_SECONDS = 10.0
"""The kubelet's default, --cpu-manager-reconcile-period."""


class CpuManager:
    """Loaded from its file when the kubelet starts."""

    def __init__(self, root: Path, machine: Topology, rules: AdmissionRules) -> None:
        """Raises StateFault for a file that does not suit the machine and the rules, unless it gives nothing away."""
        self.assigned: dict[str, dict[str, frozenset[int]]] = {}
        """Pod UID -> container -> its exclusive CPUs."""
        self.between: Callable[[], None] = nothing
        """Called between the two writes of a change."""
        self._file = root / cpu_checkpoint.NAME
        self._policy = rules.cpu_manager
        self._all: frozenset[int] = frozenset()
        if rules.cpu_manager == "static":
            self._all = frozenset(machine.cpu_topology.node_of)
            if CpuOption.STRICT_RESERVATION in rules.cpu_options:
                self._all -= kept_for_the_system(machine, rules)
        known = cpu_checkpoint.load_cpu_state(root)
        if known is not None and known.exclusive:
            cpu_checkpoint.check_cpu_state(known, machine, rules)
            for (uid, container), cpus in known.exclusive.items():
                self.assigned.setdefault(uid, {})[container] = cpus
        self._shared = self._left()
        self._write()

    def drop(self, active: frozenset[str] | None) -> None:
        """Drops what pods have that are not active. None: which pods are active is not known yet, so none is dropped."""
        for uid in [uid for uid in self.assigned if active is not None and uid not in active]:
            for container in list(self.assigned[uid]):
                del self.assigned[uid][container]
                if not self.assigned[uid]:
                    del self.assigned[uid]
                self._write()
                self.between()
                self._shared = self._left()
                self._write()

    def assign(self, uid: str, container: str, cpus: frozenset[int]) -> None:
        """Gives CPUs to a container; those of init containers of its pod may be among them."""
        self._shared -= cpus
        self._write()
        self.between()
        self.assigned.setdefault(uid, {})[container] = cpus
        self._write()

    def _left(self) -> frozenset[int]:
        return self._all.difference(*(cpus for pod in self.assigned.values() for cpus in pod.values()))

    def _write(self) -> None:
        entries = {
            uid: {container: format_cpuset(cpus) for container, cpus in containers.items()}
            for uid, containers in self.assigned.items()
        }
        replace(self._file, cpu_file(self._policy, format_cpuset(self._shared), entries))


def kept_for_the_system(machine: Topology, rules: AdmissionRules) -> frozenset[int]:
    """None where they cannot be chosen: every pod will be refused for that."""
    try:
        return read_reserved_cpus(machine, rules)
    except NoFit:
        return frozenset()
