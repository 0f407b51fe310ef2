"""Machines whose GPUs are shared in time, and agents on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.machines import load_machine
from topoalign.machines.document import Machine, encode
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.device_plugin.kubelet import Kubelet
from topoalign.tools.bench.device_plugin.node import GPUS, MACHINE, Settings, node, scratch

SHARING = "version: v1\nsharing: {timeSlicing: {resources: [{name: %s, replicas: %d}]}}\n"
"""NVIDIA's configuration file for this."""


def with_uuids(gpus: int) -> Topology:
    """A machine with so many GPUs, under ids as long as NVIDIA's, and no NIC."""
    machine = load_machine(MACHINE).topology
    named = tuple(
        msgspec.structs.replace(gpu, id=DeviceID(f"GPU-{gpu.index:08x}-0000-0000-0000-000000000000"))
        for gpu in machine.gpus[:gpus]
    )
    return msgspec.structs.replace(machine, gpus=named, nics=(), links=())


@contextmanager
def shared_node(name: str, settings: Settings, replicas: int) -> Iterator[tuple[Kubelet, Agent, list[DeviceID]]]:
    """An agent with eight GPUs, each shared so many ways, its kubelet, and the shares."""
    with scratch() as folder:
        machine, config = folder / "machine.json", folder / "config.yaml"
        topology = with_uuids(len(GPUS))
        machine.write_bytes(encode(Machine(name=name, topology=topology)))
        config.write_text(SHARING % (GPU, replicas))
        shares = [share for gpu in topology.gpus for share in handed_out(gpu.id, replicas)]
        told = settings | {"MACHINE": str(machine), "CONFIG": str(config)}
        with node(name, told, healthy=len(shares)) as (kubelet, agent):
            yield kubelet, agent, shares
