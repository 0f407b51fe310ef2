"""Machines whose GPUs are shared in time, in units or in slots, and agents on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.machines import load_machine
from topoalign.machines.document import Machine, encode_machine
from topoalign.plugin_config.configuration import Units
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.device_plugin.kubelet import Kubelet
from topoalign.tools.bench.device_plugin.node import GPUS, MACHINE, Settings, node, scratch

SHARING = "version: v1\nsharing: {timeSlicing: {resources: [{name: %s, replicas: %d}]}}\n"
"""NVIDIA's configuration file for this."""


IN_UNITS = "version: v1\nsharing: {units: {}}\n"
IN_SLOTS = "version: v1\nsharing: {slots: {replicas: %d}}\n"
CORES = ResourceName(Units().cores)
MEMORY = ResourceName(Units().memory)
"""Computing time and memory of GPUs."""


def with_uuids(gpus: int, name: str = MACHINE) -> Topology:
    """A machine of the catalogue with so many GPUs, under ids as long as NVIDIA's, and no NIC."""
    machine = load_machine(name).topology
    named = tuple(
        msgspec.structs.replace(gpu, id=DeviceID(f"GPU-{gpu.index:08x}-0000-0000-0000-000000000000"))
        for gpu in machine.gpus[:gpus]
    )
    return msgspec.structs.replace(machine, gpus=named, nics=(), links=())


def with_blocks(gpus: int, blocks: int, name: str = MACHINE) -> Topology:
    """The same, where each GPU has so many blocks of memory."""
    topology = with_uuids(gpus, name)
    sized = tuple(msgspec.structs.replace(gpu, memory=blocks * MEMORY_BLOCK) for gpu in topology.gpus)
    return msgspec.structs.replace(topology, gpus=sized)


@contextmanager
def described_node(
    name: str,
    settings: Settings,
    topology: Topology,
    config: str,
    healthy: int,
    resources: Sequence[ResourceName] = (GPU,),
) -> Iterator[tuple[Kubelet, Agent]]:
    """An agent on this machine with this configuration file, and its kubelet, once so many devices are listed as healthy."""
    with scratch() as folder:
        machine = folder / "machine.json"
        file = folder / "config.yaml"
        machine.write_bytes(encode_machine(Machine(name=name, topology=topology)))
        file.write_text(config)
        told = settings | {"MACHINE": str(machine), "CONFIG": str(file)}
        with node(name, told, healthy=healthy, resources=resources) as (kubelet, agent):
            yield kubelet, agent


@contextmanager
def node_in_units(name: str, settings: Settings, blocks: int) -> Iterator[tuple[Kubelet, Agent, Topology]]:
    """An agent with eight GPUs in units, each with so many blocks of memory, its kubelet, and the machine."""
    topology = with_blocks(len(GPUS), blocks)
    healthy = len(GPUS) * (100 + blocks)
    with described_node(name, settings, topology, IN_UNITS, healthy, (CORES, MEMORY)) as (kubelet, agent):
        yield kubelet, agent, topology


@contextmanager
def node_in_slots(name: str, settings: Settings, slots: int) -> Iterator[tuple[Kubelet, Agent, Topology]]:
    """An agent with eight GPUs of 80 GiB in so many slots each, its kubelet, and the machine."""
    topology = with_blocks(len(GPUS), 320)
    with described_node(name, settings, topology, IN_SLOTS % slots, len(GPUS) * slots) as (kubelet, agent):
        yield kubelet, agent, topology


@contextmanager
def shared_node(name: str, settings: Settings, replicas: int) -> Iterator[tuple[Kubelet, Agent, list[DeviceID]]]:
    """An agent with eight GPUs, each shared so many ways, its kubelet, and the shares."""
    topology = with_uuids(len(GPUS))
    shares = [share for gpu in topology.gpus for share in handed_out(gpu.id, replicas)]
    with described_node(name, settings, topology, SHARING % (GPU, replicas), len(shares)) as (kubelet, agent):
        yield kubelet, agent, shares
