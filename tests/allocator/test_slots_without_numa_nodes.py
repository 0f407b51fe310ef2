"""
Slots are listed to the kubelet without NUMA nodes, so that its Topology Manager keeps no pod from the GPUs that a node has,
and with them by `sharing.slots.numaTopology`: over real sockets, on machines of the catalogue.
"""

from random import Random

import msgspec
import pytest
from faults_support import THOROUGH
from slot_node_support import Ask, SlotNode
from slot_support import MIB, PLAIN, WITH_NUMA_NODES, in_slots

from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import Policy
from topoalign.core.model.topology.model import Topology
from topoalign.machines.catalogue import machine

pytestmark = pytest.mark.anyio

MACHINES = ("hgx-h100", "dgx-a100", "epyc-nps4-4gpu")
ALIGNING = (Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)


class MachineInSlots(SlotNode):
    """All GPUs of a machine in ten slots each."""

    def offered(self, machine: Topology) -> Topology:
        return in_slots(machine, 10, scaling=self.terms)


def alone_on(machine: Topology) -> int:
    """MiB of which a GPU has enough for one container, and not for two: 60000 on GPUs of 80 GB."""
    return (machine.gpus[0].memory or 0) // MIB * 3 // 4


@pytest.mark.parametrize("policy", [*Policy])
@pytest.mark.parametrize("name", MACHINES)
async def test_a_pod_of_any_number_of_gpus_runs_on_the_empty_node(name: str, policy: Policy) -> None:
    """The prediction, what is reserved and the kubelet agree."""
    hardware = machine(name)
    async with MachineInSlots.running(policy, machine=hardware) as (it, _):
        for gpus in range(1, len(hardware.gpus) + 1):
            pod = it.asking(f"p{gpus}", Ask(gpus, memory=1_000))
            predicted = it.reserve(pod)[0]
            decision = await it.admit_pod(pod)
            await it.check([pod.name])

            assert isinstance(predicted, Admission) and isinstance(decision, Admission), (gpus, predicted, decision)
            assert {(0, 1_000 * MIB)} == {(each.cores, each.memory) for each in it.held(pod.name).values()}
            assert gpus == len(it.held(pod.name))
            await it.remove(pod.name)


@pytest.mark.parametrize("policy", [*Policy])
@pytest.mark.parametrize("name", MACHINES)
async def test_pods_of_one_gpu_fill_all_gpus_one_after_another(name: str, policy: Policy) -> None:
    hardware = machine(name)
    async with MachineInSlots.running(policy, machine=hardware) as (it, _):
        names = [f"p{number}" for number in range(len(hardware.gpus))]
        for each in names:
            pod = it.asking(each, Ask(memory=alone_on(hardware)))
            assert isinstance(it.reserve(pod)[0], Admission)
            assert isinstance(await it.admit_pod(pod), Admission)
            await it.allocations.reconcile()
        await it.check(names)

        assert {gpu.id for gpu in hardware.gpus} == {gpu for each in names for gpu in it.held(each)}
        last = it.asking("last", Ask(memory=alone_on(hardware)))
        assert isinstance(it.reserve(last)[0], Refusal)


@pytest.mark.parametrize("policy", [*Policy])
@pytest.mark.parametrize("name", MACHINES)
async def test_numa_topology_keeps_a_pod_to_the_gpus_of_a_numa_node(name: str, policy: Policy) -> None:
    """As predicted: no pod with slots of more GPUs than that fits, unless nothing is aligned."""
    hardware = machine(name)
    (most,) = {
        len([gpu for gpu in hardware.gpus if gpu.numa_affinity == nodes.numa_affinity]) for nodes in hardware.gpus
    }
    async with MachineInSlots.running(policy, None, hardware, WITH_NUMA_NODES) as (it, _):
        fits = []
        for gpus in range(1, len(hardware.gpus) + 1):
            pod = it.asking(f"p{gpus}", Ask(gpus, memory=1_000))
            predicted = it.reserve(pod)[0]
            decision = await it.admit_pod(pod)
            assert isinstance(predicted, Admission) is isinstance(decision, Admission)
            if isinstance(predicted, Refusal):
                assert "ShareSplit" == predicted.code and "numaTopology" in predicted.remedy
                assert isinstance(decision, Refusal) and "several slots of" in decision.finding
                await it.kubelet.remove(pod.namespace, pod.name)
            else:
                fits.append(gpus)
                await it.remove(pod.name)

        assert [*range(1, (len(hardware.gpus) if policy is Policy.NONE else most) + 1)] == fits


async def test_a_changed_setting_is_listed_without_a_restart() -> None:
    """A pod with slots of 5 GPUs goes on; the kubelet is given the NUMA nodes of all slots, or of none."""
    hardware = machine("hgx-h100")
    async with MachineInSlots.running(Policy.BEST_EFFORT, machine=hardware) as (it, _):
        first = it.asking("first", Ask(5, memory=1_000))
        it.reserve(first)
        assert isinstance(await it.admit_pod(first), Admission)
        found = []
        for revision, terms in enumerate((WITH_NUMA_NODES, PLAIN), 2):
            known = it.ledger.state.topology
            assert known is not None
            topology = in_slots(hardware, 10, scaling=terms)
            it.ledger.take_reading(msgspec.structs.replace(known, revision=revision, topology=topology))
            nodes = {*topology.devices[GPU].values()}
            await it.kubelet.until(
                lambda kubelet, nodes=nodes: {*kubelet.state().hardware.devices[GPU].values()} == nodes  # type: ignore[misc]  # a default
            )
            found += [isinstance(each, Admission) for each in it.reserve(it.asking("next", Ask(5, memory=1_000)))]
            await it.check(["first"])

        assert [False, True] == found


@pytest.mark.parametrize("seed", range(20 if THOROUGH else 1))
async def test_what_the_extender_offers_the_kubelet_admits(seed: int) -> None:
    """Random pods: no container has another's amounts."""
    chance = Random(seed)
    hardware = machine(MACHINES[seed % 3])
    policy = ALIGNING[seed // 3 % 3]
    whole = (hardware.gpus[0].memory or 0) // MIB
    async with MachineInSlots.running(policy, Random(seed), hardware) as (it, _):
        running_pods: dict[str, Ask] = {}
        number = admitted = 0
        while admitted < (1_000 if THOROUGH else 30):
            number += 1
            if running_pods and chance.random() < 0.5:
                gone = chance.choice([*running_pods])
                del running_pods[gone]
                await it.remove(gone)
            gpus = chance.choice([1, 1, 1, 2, 2, 3, 4, len(hardware.gpus)])
            ask = Ask(gpus, chance.choice([0, 1_000, 9_000, 30_000]), chance.choice([0, 10, 40]))
            pod = it.asking(f"p{number}", ask)
            if not isinstance(it.reserve(pod)[0], Admission):
                continue
            decision = await it.admit_pod(pod)
            assert isinstance(decision, Admission), (number, ask, decision)
            running_pods[pod.name] = ask
            admitted += 1
            await it.check(running_pods)
            for name, asked in running_pods.items():
                amount = Amount(cores=asked.cores, memory=(asked.memory or whole) * MIB)
                assert [amount] * asked.gpus == [*it.held(name).values()], (number, name)
