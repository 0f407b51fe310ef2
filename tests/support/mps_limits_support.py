"""Nodes whose units or slots are limited by MPS: what is announced of its daemon, and what each container is told alone."""

from pathlib import Path
from typing import Any

import msgspec
from share_support import DEFAULT
from slot_node_support import MACHINE, SlotNode

from topoalign.allocator.containers.containers import Containers
from topoalign.core.model.ids import GPU, PodName, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration, Flags
from topoalign.plugin_config.mps_files import Announcement, Serves

THREADS, MEMORY_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def by_mps(machine: Topology) -> Topology:
    """The same offers, those of amounts limited by MPS."""
    offers = tuple(
        msgspec.structs.replace(each, sharing="mps", limiter=None) if each.by_amounts else each
        for each in machine.offered
    )
    return msgspec.structs.replace(machine, offers=offers)


class Announced:
    """The root of MPS of a node, with a daemon that is called after this resource, or none."""

    def __init__(self, root: Path, daemon: ResourceName, machine: Topology) -> None:
        self.root, self.daemon = root, daemon
        self.announcement = Announcement(root, daemon)
        self.serves = Serves(devices=frozenset(machine.gpu_by_id), replicas=0)
        (root / daemon).mkdir(parents=True)
        self.containers = Containers(lambda: Configuration(flags=Flags(mps_root=str(root))))

    @property
    def everywhere(self) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """What each answer has: the variable of the pipes, and the mounts."""
        pipe = f"/mps/{self.daemon}/pipe"
        return {PIPES: pipe}, [(pipe, f"{self.root}/{self.daemon}/pipe"), ("/dev/shm", f"{self.root}/shm")]


class LimitedSlotNode(SlotNode):
    """As `SlotNode`, limited by MPS."""

    def __init__(self, directory: Path, *options: Any) -> None:
        super().__init__(directory, *options)
        self.mps = Announced(directory / "mps", GPU, MACHINE)
        self.containers = self.mps.containers

    def offered(self, machine: Topology) -> Topology:
        return by_mps(super().offered(machine))

    def limits(self, name: str) -> dict[str, str]:
        (answer,) = self.kubelet.running[DEFAULT, PodName(name)].responses.values()
        return own(answer, self.mps)


def own(answer: v1beta1.ContainerAllocateResponse, mps: Announced) -> dict[str, str]:
    """What an answer says to its container alone; the rest is as it has to be."""
    variables, mounts = mps.everywhere
    assert mounts == [(each.container_path, each.host_path) for each in answer.mounts]
    assert variables.items() <= answer.envs.items()
    assert [*answer.envs] == sorted(answer.envs)
    return {name: value for name, value in answer.envs.items() if name not in (PIPES, "NVIDIA_VISIBLE_DEVICES")}
