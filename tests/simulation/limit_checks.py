"""
F29 and F30: what limits a container is its own and no other's, by the files that it has mounted and the variables that it
was told; and nothing that is not the agent's is touched.

The files are read by their layout, as the library reads them, and not by the code that writes them.
"""

from pathlib import Path

from simulation.amounts import Amounts
from simulation.divisions import ALL_CORES, ALL_MEMORY, card, much, way
from simulation.kubelet import Kubelet
from simulation.pods import Container, Pod
from simulation.starts import Answer
from simulation.world import Violation, World

from topoalign.allocator.containers.hami_core import slot_directories as hami_core
from topoalign.allocator.containers.vcuda import unit_directories as vcuda
from topoalign.allocator.containers.vcuda.unit_directories import CONFIG_FILE
from topoalign.core.model.ids import ContainerName
from topoalign.core.state.fold import NodeState

UNITS_AT, SLOTS_AT = "/etc/vcuda", "/usr/local/vgpu"
SPOILT_SECONDS = 30.0
"""Until what somebody has spoilt is as it should be: it stays so for up to 20 s, and is looked for every 5 s."""
MIB = 1024 * 1024


class LimitChecks:
    """Looks at the directories of the containers of one node."""

    def __init__(self, world: World, kubelet: Kubelet | None, amounts: Amounts) -> None:
        """`amounts`: what the journal has of each allocation."""
        self._world, self._kubelet, self._amounts = world, kubelet, amounts
        if kubelet is not None and world.limiter != "none":
            kubelet.began.append(self.begins)

    def begins(self, pod: Pod, container: Container) -> None:
        """A container begins to run."""
        assert self._kubelet is not None
        if self._is_spoilt():
            return
        for resource in container.limits:
            answer = self._kubelet.answers.get((pod.uid, container.name, resource))
            if answer is None:
                continue
            if UNITS_AT in answer.mounts:
                self._expect_limits(pod, container, Path(answer.mounts[UNITS_AT]))
            if SLOTS_AT in answer.mounts:
                self._expect_variables(pod, container, answer)

    def after_step(self) -> None:
        """No container that runs sees what is another pod's, and no link was followed."""
        limits, kubelet = self._world.limits, self._kubelet
        if kubelet is None or limits.limiter == "none":
            return
        if not (limits.elsewhere / "kept").is_file():
            self._violate("F29", "a file outside the root is gone: a link was followed")
        for key in kubelet.used:
            uid, answer = key[0], kubelet.answers.get(key)
            if uid in kubelet.lost or answer is None:
                continue
            if UNITS_AT in answer.mounts:
                owner = owner_of_units(Path(answer.mounts[UNITS_AT]))
                if owner is not None and owner[0] != uid:
                    self._violate("F29", f"{uid} sees the limits of {owner[0]}")
            if SLOTS_AT in answer.mounts:
                whose = owner_of_slots(Path(answer.mounts[SLOTS_AT]).parent)
                if whose not in ("", uid) and uid not in self._amounts.unknown:
                    self._violate("F30", f"{uid} has the directory of {whose}")

    def converged(self, state: NodeState) -> str | None:
        """
        In the end each container with slots has its directory, and no directory is left over. None: so it is. An init
        container has ended, or begins with what it had: what became of its directory meanwhile nobody mends.
        """
        limits, kubelet = self._world.limits, self._kubelet
        if kubelet is None or limits.limiter == "none" or self._is_spoilt():
            return None
        if limits.limiter == "hami-core" and self._world.division == "slots":
            for key in kubelet.used:
                answer = kubelet.answers.get(key)
                if answer is None or SLOTS_AT not in answer.mounts or kubelet.role_of(key) == "init":
                    continue
                if key[0] in kubelet.lost:
                    continue  # who has these slots may be known to nobody any more
                if not Path(answer.mounts[SLOTS_AT]).is_dir():
                    return f"the directory of {key} is missing"
        name = vcuda.units_directory_name if limits.limiter == "vcuda" else hami_core.slots_directory_name
        places = {*kubelet.entries.items(), *kubelet.file.items(), *kubelet.used.items()}
        needed = {name(resource, devices) for (_, _, resource), devices in places}
        live = state.allocations.values()
        needed |= {name(resource, ids) for each in live for resource, ids in each.from_kubelet.items()}
        pods = kubelet.directories.now()
        there = {uid for uid in pods.torn_down if not pods.is_gone(uid)}
        owners = {each: owner_of(each) for each in limits.present()}
        left = [each.name for each, uid in owners.items() if each.name not in needed and uid not in there]
        return f"directories are left over: {left}" if left and kubelet.readable else None

    def _expect_limits(self, pod: Pod, container: Container, at: Path) -> None:
        """`vcuda.config` of this directory is for this container."""
        assert self._kubelet is not None
        units = [
            device
            for resource in container.limits
            for device in self._kubelet.used.get((pod.uid, container.name, resource), ())
            if way(device) == "unit"
        ]
        cores = int(sum(much(unit).cores for unit in units))
        memory = int(sum(much(unit).memory for unit in units))
        gpus = len({card(unit) for unit in units})
        if cores >= ALL_CORES:
            memory = max(memory, ALL_MEMORY * gpus)
        else:
            cores, memory = cores // gpus, memory // gpus  # the library limits one GPU
        expected = (pod.uid, container.name, memory, cores or ALL_CORES, int(cores < ALL_CORES))
        found = limits_in(at / CONFIG_FILE)
        if found is None and self._world.division != "units":
            return  # nobody is limited any more; without the file the library ends the container's processes
        if found != expected and not self._has_units_of_another(pod, container):
            self._violate("F29", f"{container.name} of {pod.name} starts with {found} and should with {expected}")

    def _has_units_of_another(self, pod: Pod, container: Container) -> bool:
        """Whether a container of the same pod has just the same units: then the directory may be named after that."""
        assert self._kubelet is not None
        own = [self._kubelet.used.get((pod.uid, container.name, resource)) for resource in container.limits]
        return any(
            key[0] == pod.uid and key[1] != container.name and devices in own
            for key, devices in self._kubelet.used.items()
        )

    def _expect_variables(self, pod: Pod, container: Container, answer: Answer) -> None:
        """The limits are those that the journal has of its slots, whichever GPU is counted first."""
        recorded = [each for each in self._amounts.granted.get(answer.name, {}).values() if each is not None]
        wanted = sorted(f"{max(1, int(each.memory) // MIB)}m" for each in recorded)
        found = sorted(text for name, text in answer.variables.items() if name.startswith("CUDA_DEVICE_MEMORY_LIMIT_"))
        if recorded and found != wanted:
            self._violate("F30", f"{container.name} of {pod.name} is told {found}, and the journal has {wanted}")

    def _is_spoilt(self) -> bool:
        limits = self._world.limits
        return limits.full or self._world.loop.time() - limits.spoilt_at < SPOILT_SECONDS

    def _violate(self, fault: str, finding: str) -> None:
        self._world.violate(Violation(fault, finding))


def limits_in(file: Path) -> tuple[str, ContainerName, int, int, int] | None:
    """Pod UID, container, memory, utilization and enable of a `vcuda.config`; None where there is none."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    memory = int.from_bytes(content[8208:8216], "little")
    utilization, enable = (int.from_bytes(content[at : at + 4], "little") for at in (8216, 8232))
    return text(content, 0), ContainerName(text(content, 4096)), memory, utilization, enable


def text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()


def owner_of_units(at: Path) -> tuple[str, str] | None:
    found = limits_in(at / CONFIG_FILE) if not at.is_symlink() else None
    return found[:2] if found is not None else None


def owner_of_slots(at: Path) -> str:
    """UID of the pod whose directory it is; empty where that is not written."""
    try:
        return (at / hami_core.OWNER).read_text().partition("\n")[2].strip() if not at.is_symlink() else ""
    except OSError:
        return ""


def owner_of(at: Path) -> str:
    """UID of the pod whose directory it is; empty where that is not written."""
    found = owner_of_units(at)
    return found[0] if found is not None else owner_of_slots(at)
