"""
A prediction counts devices as the kubelet will have them when the next pod comes, not as the record has them still.

The node has GPU-0 and GPU-1 on NUMA node 0, GPU-2 and GPU-3 on NUMA node 1.
"""

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from decision_support import container, machine, node, pod
from kubelet_files_support import VOLUME, write_files
from kubelet_support import short_directory

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import KubeletFiles, KubeletWatch
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation, Owner
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, Mode, PodRequest
from topoalign.core.state.fold import NodeState
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

STATE = node(machine())
RULES = AdmissionRules(mode=Mode.KUBELET, reserved_cpus="0")
CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: restricted
"""


def allocation(name: str, *gpus: str, owner: tuple[str, str] | None = None) -> Allocation:
    """`owner`: pod and container."""
    return Allocation(
        id=AllocationID(name),
        owner=Owner(namespace=Namespace("default"), pod=PodName(owner[0]), container=ContainerName(owner[1]))
        if owner
        else None,
        devices={GPU: tuple(map(DeviceID, gpus))},
    )


class Node:
    """A node whose kubelet's files list these pods by their UIDs, and whose record has these allocations."""

    def __init__(self, root: Path, listed: Sequence[Allocation], recorded: Sequence[Allocation]) -> None:
        self.root, self.ended, self.clock = root, list[Allocation](), ManualClock()
        self.is_away = False
        """Whether the kubelet does not say which containers have ended."""
        (root / "config.yaml").write_text(CONFIG)
        state: NodeState = STATE
        for each in listed:
            state = state.holding(each)
        write_files(root, state, AdmissionRules(mode=Mode.KUBELET, cpu_manager="none", memory_manager="None"))
        self.ledger = Ledger(STATE.node, MemoryJournal(), self.clock)
        assert STATE.topology is not None and STATE.health is not None
        self.ledger.take_reading(STATE.topology)
        self.ledger.take_reading(STATE.health)
        if recorded:
            self.ledger.grant(recorded)
        files = KubeletFiles(root / "config.yaml", root, RULES, 30)
        self.watch = KubeletWatch(self.ledger, files, self.clock, ended=self.over)
        self.admissions = Admissions(
            self.ledger,
            MemoryBus(),
            RULES,
            kubelet_owns_devices=True,
            predictions=Predictions(self.ledger, RULES, self.watch, kubelet_owns_devices=True),
        )

    async def over(self) -> Sequence[Allocation]:
        if self.is_away:
            raise Unavailable("PodResources did not answer in time", "see whether the kubelet runs")
        return self.ended

    async def lags(self) -> bool:
        """Whether a prediction says that the record lags, or may."""
        _, notes = await self.asked(1)
        return any("the record lags" in note or "the record may lag" in note for note in notes)

    def gone(self, uid: str) -> None:
        shutil.rmtree(self.root / "pods" / uid)

    def listed(self) -> list[str]:
        """The UIDs of the pods for which the files list something that counts."""
        usage = self.ledger.state.usage
        assert usage is not None and usage.kubelet is not None
        return [each.pod_uid for each in usage.kubelet.entries]

    async def asked(self, gpus: int, name: str = "next") -> tuple[set[str], tuple[str, ...]]:
        """Which GPUs a container would get, none if it is refused, and the notes."""
        decision: Decision = await self.admissions.predictions.what_if(
            AllocateRequest(node=STATE.node, pod=asking(gpus, name), rules={})
        )
        got = decision.allocations[0].device_ids if isinstance(decision, Admission) else frozenset()
        return {*got}, decision.explanation.notes


def asking(gpus: int, name: str) -> PodRequest:
    return pod(container("main", gpus=gpus), name=name)


ALL = {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}
OLD = allocation("old", "GPU-0", "GPU-1", owner=("uid-old", "main"))
RECORDED = allocation("1-1", "GPU-0", "GPU-1", owner=("job", "main"))


async def test_what_is_still_recorded_of_a_pod_that_is_gone_is_free(tmp_path: Path) -> None:
    """What the record and the checkpoint still have of a pod that is gone is free."""
    it = Node(tmp_path, [OLD], [RECORDED])
    held, _ = await it.asked(4)
    it.gone("uid-old")
    free, notes = await it.asked(4)

    assert (set(), ALL) == (held, free)
    assert "'uid-old'" in notes[0] and "counts as free" in notes[0]


async def test_the_preferred_devices_are_those_of_the_kubelets_next_state(tmp_path: Path) -> None:
    """
    The preferred devices are those of the state that the kubelet will have. The GPUs of NUMA node 0 come first once the pod
    is gone.
    """
    it = Node(tmp_path, [OLD], [RECORDED])
    before, _ = await it.asked(2)
    it.gone("uid-old")
    after, _ = await it.asked(2)

    assert ({"GPU-2", "GPU-3"}, {"GPU-0", "GPU-1"}) == (before, after)


async def test_what_was_granted_to_nobody_known_yet_is_held(tmp_path: Path) -> None:
    """
    What was granted to nobody known yet is held, whatever the checkpoint has. The kubelet has just given the devices of a
    pod that is gone to a new one, and will write that in a moment.
    """
    it = Node(tmp_path, [OLD], [allocation("1-1", "GPU-0", "GPU-1")])
    it.gone("uid-old")

    assert set() == (await it.asked(4))[0]


async def test_what_another_pod_that_runs_has_as_well_is_held(tmp_path: Path) -> None:
    """The devices of a pod that is gone went to a new one, and the record knows the former owner only."""
    new = allocation("new", "GPU-1", owner=("uid-new", "main"))
    it = Node(tmp_path, [OLD, new], [RECORDED])
    it.gone("uid-old")

    assert {"GPU-2", "GPU-3"} == (await it.asked(2))[0]
    assert {"GPU-0"} == (await it.asked(1))[0]
    shutil.rmtree(tmp_path / "pods/uid-new/volumes")
    assert {"GPU-2", "GPU-3"} == (await it.asked(2))[0]


async def test_what_is_dropped_is_announced_by_allocation(tmp_path: Path) -> None:
    """With the devices: another pod that runs may have the rest. One whose container was not seen to run is left out."""
    new = allocation("new", "GPU-1", owner=("uid-new", "main"))
    other = allocation("1-2", "GPU-2")
    it = Node(tmp_path, [OLD, new, allocation("third", "GPU-2", owner=("uid-third", "main"))], [RECORDED, other])
    it.gone("uid-old")
    it.gone("uid-third")
    await it.asked(1)
    usage = it.ledger.state.usage

    assert usage is not None and usage.kubelet is not None
    assert {"1-1": {GPU: ("GPU-0",)}} == usage.kubelet.dropped


async def test_what_the_checkpoint_does_not_list_is_held_until_it_has_ended(
    tmp_path: Path,
) -> None:
    """
    What the checkpoint does not list is held unless its container is known to have ended. The kubelet has lost its
    checkpoint, or has dropped the pod; a poll of what it says now can tell.
    """
    it = Node(tmp_path, [], [RECORDED])
    held, notes = await it.asked(4)
    it.ended = [RECORDED]
    free, told = await it.asked(4)

    assert (set(), ()) == (held, notes)
    assert ALL == free
    (note,) = told
    assert note.startswith(
        "the record still has devices of 'default/job/main', whose pods have ended: they count as free"
    )


async def test_the_record_lags_until_it_has_released_what_ended(tmp_path: Path) -> None:
    """Until then the kubelet may take other devices than are predicted. Before and afterwards there is no such note."""
    it = Node(tmp_path, [], [RECORDED])
    noted = [await it.lags()]
    it.ended = [RECORDED]
    noted.append(await it.lags())
    it.ledger.release([RECORDED.id], "gone")
    it.ended = []
    noted.append(await it.lags())

    assert [False, True, False] == noted


async def test_the_record_may_lag_while_the_kubelet_does_not_answer(tmp_path: Path) -> None:
    """Which containers have ended is not known then."""
    it = Node(tmp_path, [], [RECORDED])
    it.is_away = True
    away = await it.lags(), await it.asked(4)
    it.is_away = False

    assert (True, set()) == (away[0], away[1][0])
    await it.watch.poll()
    usage = it.ledger.state.usage
    assert usage is not None and usage.kubelet is not None
    assert () == usage.kubelet.notes, "the next poll knows it"
    assert not await it.lags()


async def test_what_an_ended_container_had_is_free_while_volumes_are_mounted(tmp_path: Path) -> None:
    """What a container that has ended had is free while its volumes are still mounted."""
    it = Node(tmp_path, [OLD], [RECORDED])
    it.ended = [RECORDED]

    assert ALL == (await it.asked(4))[0]


async def test_a_pod_that_runs_again_under_its_uid_has_not_ended(tmp_path: Path) -> None:
    """A static pod keeps its UID: what the files list for it counts again."""
    former = msgspec.structs.replace(RECORDED, pod_uid="uid-old")
    it = Node(tmp_path, [OLD], [former])
    it.ended = [former]
    await it.asked(1)
    ended = it.listed()
    it.ledger.release([former.id], "gone")
    it.ended = []
    await it.asked(1)
    released = it.listed()
    it.ledger.grant([msgspec.structs.replace(former, id=AllocationID("1-2"))])
    await it.asked(1)

    assert ([], [], ["uid-old"]) == (ended, released, it.listed())


async def test_unrecorded_devices_of_an_init_container_are_held_with_its_pod(tmp_path: Path) -> None:
    """
    Devices of an init container that no record has are held as long as its pod runs. It ended before this process started,
    and PodResources shows plain init containers to nobody.
    """
    init = allocation("init", "GPU-0", "GPU-1", owner=("uid-old", "init"))
    it = Node(tmp_path, [init], [])
    held, _ = await it.asked(4)
    it.gone("uid-old")
    free, _ = await it.asked(4)

    assert (set(), ALL) == (held, free)


async def test_devices_of_a_pod_without_volumes_count_by_the_record_alone(tmp_path: Path) -> None:
    """Whether it has ended its directory does not tell, and PodResources does."""
    for recorded, expected in (([], ALL), ([RECORDED], set[str]())):
        root = tmp_path / str(len(recorded))
        root.mkdir()
        it = Node(root, [OLD], recorded)
        (root / "pods/uid-old" / VOLUME).rmdir()
        (root / "pods/uid-old" / VOLUME).parent.rmdir()

        assert expected == (await it.asked(4))[0]


async def test_a_pod_under_the_name_of_one_that_has_devices_is_another_pod(tmp_path: Path) -> None:
    """
    A pod that comes under the name of one that has devices is another pod. A StatefulSet makes its pods anew under their
    names; the kubelet goes by UIDs.
    """
    it = Node(tmp_path, [OLD], [RECORDED])

    assert {"GPU-2", "GPU-3"} == (await it.asked(2, "job"))[0]
    assert {"GPU-2"} == (await it.asked(1, "job"))[0]
    it.gone("uid-old")
    assert ALL == (await it.asked(4, "job"))[0]


@pytest.mark.parametrize(("age", "noted"), [(0, True), (119, True), (120, False), (-5, False)])
async def test_while_a_kubelet_settles_a_note_says_that_it_drops_nothing_yet(age: int, noted: bool) -> None:
    """A socket from the future is one before the clock was set: nothing is known of its age."""
    with short_directory() as root, socket.socket(socket.AF_UNIX) as listening:
        it = Node(root, [], [])
        path = root / "device-plugins/kubelet.sock"
        listening.bind(str(path))
        started = it.clock.wall() - age
        os.utime(path, (started, started))

        _, notes = await it.asked(1)

    assert ([f"the kubelet started {age} s ago"] if noted else []) == [note.split(":")[0] for note in notes]


async def test_a_file_in_place_of_the_socket_is_no_kubelet_that_started(tmp_path: Path) -> None:
    it = Node(tmp_path, [], [])
    path = tmp_path / "device-plugins/kubelet.sock"
    path.write_text("")
    os.utime(path, (it.clock.wall(), it.clock.wall()))

    assert () == (await it.asked(1))[1]
