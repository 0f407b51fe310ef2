"""A host with a driver, as files below a directory; a node with all that containers can be told of; the rules of CDI."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from device_allocations_support import MemoryAllocator
from fact_support import mig_device
from kubelet_support import served

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Nic, NumaNode, Topology, VirtualFunction
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration

DRIVER = "550.54.15"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
MIG = ResourceName("nvidia.com/mig-1g.10gb")
FUNCTIONS = ResourceName("topoalign.io/vf-100g")
CDI_FILE = "k8s.device-plugin.nvidia.com-gpu.json"

WHOLE = ("GPU-a", "GPU-b")
SHARED = ("GPU-c",)
INSTANCES = ("MIG-x", "MIG-y", "MIG-z")
MIG_MINORS = """\
config 1
monitor 2
gpu4/gi7/access 21
gpu4/gi7/ci0/access 22
gpu4/gi9/access 30
gpu4/gi9/ci1/access 31
gpu3/gi1/access 40
gpu3/gi1/ci0/access 41
gpu3/gi1/ci1/access 42
"""


def machine() -> Topology:
    """GPUs whose index is not their minor; one of them shared, two divided by MIG; a NIC, and one with virtual functions."""
    gpus = (
        Gpu(id=DeviceID("GPU-a"), index=0, minor=7),
        Gpu(id=DeviceID("GPU-b"), index=2, minor=0),
        Gpu(id=DeviceID("GPU-c"), index=3, minor=2),
        Gpu(
            id=DeviceID("GPU-d"),
            index=4,
            minor=4,
            mig=(mig_device("MIG-x", 7, index=0), mig_device("MIG-y", 9, index=2, compute_instance=1)),
        ),
        Gpu(id=DeviceID("GPU-e"), index=5, minor=3, mig=(mig_device("MIG-z", 1, index=0),)),
    )
    nics = (
        Nic(id=DeviceID("mlx5_0"), index=0, pci="0000:0c:00.0", verbs="uverbs0"),
        Nic(
            id=DeviceID("mlx5_1"),
            index=1,
            pci="0000:12:00.0",
            verbs="uverbs1",
            virtual_functions=(
                VirtualFunction(pci="0000:12:00.1", name="mlx5_2", verbs="uverbs5"),
                VirtualFunction(pci="0000:12:00.2", name="mlx5_3", verbs="uverbs3"),
                VirtualFunction(pci="0000:12:00.3"),
            ),
        ),
    )
    return Topology(
        nodes=(NumaNode(id=0),),
        gpus=gpus,
        nics=nics,
        offers=(
            Offer(resource=GPU, devices=tuple(map(DeviceID, WHOLE))),
            Offer(resource=GPU, devices=tuple(map(DeviceID, SHARED)), replicas=3),
            Offer(resource=MIG, devices=tuple(map(DeviceID, INSTANCES))),
            Offer(resource=NIC, devices=(DeviceID("mlx5_0"),)),
            Offer(resource=FUNCTIONS, devices=tuple(DeviceID(each.pci) for each in nics[1].virtual_functions)),
        ),
    )


class Host:
    """The files of a host: its root, its /proc, and where its runtime reads CDI specifications."""

    def __init__(self, directory: Path) -> None:
        self.root, self.proc, self.cdi = directory / "root", directory / "proc", directory / "cdi"
        self.cdi.mkdir()
        for path in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
            self.put(f"dev/{path}")
        for library in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
            self.put(f"{LIBRARIES}/{library}.so.{DRIVER}")
            (self.root / LIBRARIES / f"{library}.so.1").symlink_to(f"{library}.so.{DRIVER}")
        self.put(f"{LIBRARIES}/libc.so.6")
        self.put("usr/bin/nvidia-smi")
        self.put("usr/bin/nvidia-ctk")
        minors = self.proc / "driver/nvidia-caps/mig-minors"
        minors.parent.mkdir(parents=True)
        minors.write_text(MIG_MINORS)

    def put(self, path: str) -> Path:
        """A device node needs root to be made; a file stands for it, as only its presence is looked at."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return file

    def configuration(
        self, *strategies: str, imex: object = None, plugin: object = None, **flags: Any
    ) -> Configuration:
        """As if the file said so; this host's root is mounted where the configuration says."""
        told = {
            "deviceListStrategy": strategies or ("envvar",),
            "containerDriverRoot": str(self.root),
            **(plugin if isinstance(plugin, dict) else {}),
        }
        return msgspec.convert({"flags": {**flags, "plugin": told}, "imex": imex or {}}, Configuration)

    def containers(self, configuration: Configuration) -> Containers:
        return Containers(lambda: configuration, self.cdi, self.proc)

    def specification(self, kind: str = "gpu") -> dict[str, Any]:
        """One that is in place, held against the rules."""
        path = self.cdi / f"k8s.device-plugin.nvidia.com-{kind}.json"
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        check_specification(found)
        return found


def request(*ids: str) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=list(ids))])


async def told(
    host: Host, configuration: Configuration, *ids: str, resource: ResourceName = GPU, on: Topology | None = None
) -> v1beta1.ContainerAllocateResponse:
    """What a container is told for which these are allocated."""
    plugin = DevicePlugin(resource, MemoryAllocator(on or machine()), host.containers(configuration))
    async with served(plugin) as client:
        return (await client.allocate(request(*ids))).container_responses[0]


def nodes_of(specification: dict[str, Any]) -> dict[str, list[str]]:
    """Device -> its nodes in a container."""
    return {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        for device in specification["devices"]
    }


# The rules of the Container Device Interface 1.1.0, as its library checks them before it takes a file.

KIND = re.compile(r"[A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?")
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")
FIELDS = {
    "specification": {"cdiVersion", "kind", "devices", "containerEdits"},
    "device": {"name", "containerEdits"},
    "edits": {"env", "deviceNodes", "mounts", "hooks"},
    "deviceNodes": {"path", "hostPath", "permissions"},
    "mounts": {"hostPath", "containerPath", "options"},
    "hooks": {"hookName", "path", "args"},
}


def check_specification(specification: Mapping[str, Any]) -> None:
    assert specification.keys() <= FIELDS["specification"]
    assert KIND.fullmatch(specification["kind"])
    assert specification["devices"], "one without devices is refused"
    names = [device["name"] for device in specification["devices"]]
    assert len(names) == len(set(names))
    assert all(map(NAME.fullmatch, names))
    hosts = [node for edits in edits_in(specification) for node in edits.get("deviceNodes", []) if "hostPath" in node]
    if hosts or any(name[0].isdigit() for name in names):
        assert "0.5.0" <= specification["cdiVersion"]
    for device in specification["devices"]:
        assert device.keys() == FIELDS["device"]
        assert any(device["containerEdits"].values()), "a device without edits is refused"
    for edits in edits_in(specification):
        check_edits(edits)


def edits_in(specification: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield specification.get("containerEdits", {})
    yield from (device["containerEdits"] for device in specification["devices"])


def check_edits(edits: Mapping[str, Any]) -> None:
    assert edits.keys() <= FIELDS["edits"]
    assert all(re.fullmatch(r"[^=\n\0]+=[^\n\0]*", variable) for variable in edits.get("env", ()))
    for section in ("deviceNodes", "mounts", "hooks"):
        for entry in edits.get(section, ()):
            assert entry.keys() <= FIELDS[section]
            assert all(os.path.isabs(path) for key, path in entry.items() if key.lower().endswith("path"))
    for hook in edits.get("hooks", ()):
        assert hook["hookName"] in {"prestart", "createRuntime", "createContainer", "startContainer", "poststart"}
    for node in edits.get("deviceNodes", ()):
        assert not node.get("permissions", "").strip("rwm")
