"""Predictions of a node with a kubelet stand on that kubelet's own files, as far as they can be read."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest
from decision_support import container, machine, node, pod
from fact_support import reservation
from kubelet_files_support import basis_from, write_files

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests import kubelet_files
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import REREAD_SECONDS, KubeletFiles, KubeletWatch
from topoalign.allocator.settings import AllocatorSettings
from topoalign.core.admission.admit import admit
from topoalign.core.admission.prediction import INSTEAD
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import Allocation, UsageObserved
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, NodeName
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ConfirmRequest,
    Mode,
    Placement,
    PodRequest,
    Policy,
    Scope,
)
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import kubelet_configuration
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: single-numa-node
topologyManagerScope: pod
cpuManagerPolicy: static
reservedSystemCPUs: "0"
memoryManagerPolicy: Static
reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]
"""
STATE = node(machine())
OWN = AdmissionRules(placement=Placement.SIMPLE, compat="gaia")


class Node:
    """An allocator of a node whose kubelet keeps its files in `root`."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock()
        self.ledger = Ledger(STATE.node, MemoryJournal(), self.clock)
        assert STATE.topology is not None and STATE.health is not None
        self.ledger.take_reading(STATE.topology)
        self.ledger.take_reading(STATE.health)
        self.files = KubeletFiles(root / "config.yaml", root, OWN)
        watch = KubeletWatch(self.ledger, self.files, self.ledger.clock)
        self.admissions = Admissions(
            self.ledger,
            MemoryBus(),
            OWN,
            kubelet_owns_devices=True,
            predictions=Predictions(self.ledger, OWN, watch, kubelet_owns_devices=True),
        )

    async def what_if(self, pod: PodRequest, **rules: str) -> Decision:
        return await self.admissions.predictions.what_if(AllocateRequest(node=STATE.node, pod=pod, rules={**rules}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a kubelet holds 5 of 8 CPUs of NUMA node 0, and 60 of its 63 GiB, for a pod without devices."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    rules = kubelet_configuration.load_configuration(tmp_path / "config.yaml")
    decision = admit(STATE, pod(container("main", cpus=5, gib=60), name="uid-1"), rules)
    assert isinstance(decision, Admission)
    write_files(tmp_path, STATE.holding(decision.allocations[0]), rules)
    return tmp_path


ASKING = pod(container("main", gpus=1, cpus=4, gib=8))


@pytest.mark.parametrize(("cpus", "gib"), [(4, 1), (1, 8)], ids=["CPUs", "memory"])
async def test_cpus_and_memory_of_containers_that_never_called_us_count(root: Path, cpus: int, gib: int) -> None:
    """Either alone does not fit on NUMA node 0 any more."""
    decision = await Node(root).what_if(pod(container("main", gpus=1, cpus=cpus, gib=gib)))

    assert isinstance(decision, Admission)
    assert (1,) == decision.allocations[0].affinity
    assert () == decision.explanation.notes


async def test_devices_count_as_in_our_own_record(root: Path) -> None:
    """The kubelet's file may be older than a call that it has just made."""
    it = Node(root)
    gpus = (DeviceID("GPU-2"), DeviceID("GPU-3"))
    it.ledger.grant([Allocation(id=AllocationID("a"), devices={GPU: gpus})])

    assert isinstance(await it.what_if(ASKING), Refusal)


async def test_the_rules_are_those_of_the_kubelet_with_our_own_placement(root: Path) -> None:
    """The rules are those of the kubelet, with our own placement and compat, and the changes of the question."""
    it = Node(root)
    known = await basis_from(it.files, it.ledger.state)

    expected = kubelet_configuration.load_configuration(root / "config.yaml")
    assert msgspec.structs.replace(expected, placement=Placement.SIMPLE, compat="gaia") == known.rules
    assert (Policy.SINGLE_NUMA_NODE, Scope.POD) == (known.rules.policy, known.rules.scope)
    three = pod(container("main", gpus=3))
    assert isinstance(await it.what_if(three), Refusal)
    assert isinstance(await it.what_if(three, policy="best-effort"), Admission)


async def test_what_is_reserved_for_others_counts_in_a_confirmation(root: Path) -> None:
    """As held, until the node has given it: then it counts once."""
    it = Node(root)
    gpus = (DeviceID("GPU-2"), DeviceID("GPU-3"))
    reserved = reservation("other", ReservedContainer(container=ContainerName("main"), devices={GPU: gpus}))

    async def confirmed(*others: Reservation) -> bool:
        request = ConfirmRequest(node=STATE.node, pod=ASKING, reserved=others)
        return isinstance(await it.admissions.predictions.confirm(request), Admission)

    assert (True, False) == (await confirmed(), await confirmed(reserved))
    it.ledger.grant([Allocation(id=AllocationID("a"), devices={GPU: gpus})])
    assert not await confirmed()
    it.ledger.release([AllocationID("a")], "gone")
    assert await confirmed()


async def test_a_part_that_the_node_has_given_is_not_held_for_its_reservation(root: Path) -> None:
    """The kubelet lists other CPUs for the same pod: what was reserved for it is not held beside them."""
    it = Node(root)
    taken = reservation("1", ReservedContainer(container=ContainerName("main"), cpus="4-7,12-13"))
    asking = pod(container("main", cpus=6, gib=1))

    async def confirmed(uid: str) -> bool:
        other = msgspec.structs.replace(taken, pod_uid=uid)
        request = ConfirmRequest(node=STATE.node, pod=asking, reserved=(other,))
        return isinstance(await it.admissions.predictions.confirm(request), Admission)

    assert (True, False) == (await confirmed("uid-1"), await confirmed("uid-2"))


async def test_files_are_read_at_every_question(root: Path) -> None:
    it = Node(root)
    await it.what_if(ASKING)
    (root / "config.yaml").write_text(CONFIG.replace("single-numa-node", "restricted"))

    assert Policy.RESTRICTED is (await basis_from(it.files, it.ledger.state)).rules.policy


async def test_a_confirmation_reads_files_that_have_changed_or_are_old(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler waits for it; what a kubelet writes counts in the next one."""
    it, readings = Node(root), 0
    read = it.files.read

    async def counted(state: NodeState, ended: Sequence[AllocationID] = ()) -> KubeletObserved:
        nonlocal readings
        readings += 1
        return await read(state, ended)

    monkeypatch.setattr(it.files, "read", counted)

    async def confirmed() -> tuple[object, int]:
        """The NUMA nodes that the pod would get, and how often the files were read."""
        decision = await it.admissions.predictions.confirm(ConfirmRequest(node=STATE.node, pod=ASKING, reserved=()))
        assert isinstance(decision, Admission)
        return decision.allocations[0].affinity, readings

    assert [((1,), 1), ((1,), 1)] == [await confirmed(), await confirmed()]
    write_files(root, STATE, kubelet_configuration.load_configuration(root / "config.yaml"))
    assert [((0,), 2), ((0,), 2)] == [await confirmed(), await confirmed()]
    await it.clock.advance(REREAD_SECONDS)
    assert ((0,), 3) == await confirmed()


class SlowDisk:
    """Lets nobody read a configuration before it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def load(self, path: Path, placement: Placement) -> AdmissionRules:
        self.asked.set()
        assert self.answers.wait(60)
        return LOAD(path, placement)


LOAD = kubelet_configuration.load_configuration


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(kubelet_configuration, "load_configuration", slow.load)
    yield slow
    slow.answers.set()  # lets its thread go


async def test_questions_at_the_same_time_are_all_answered_from_the_files(root: Path, disk: SlowDisk) -> None:
    """The first is still reading when the others come."""
    files = KubeletFiles(root / "config.yaml", root, OWN, seconds=30)
    notes: list[tuple[str, ...]] = []

    async def ask() -> None:
        notes.append((await basis_from(files, STATE)).notes)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        assert await anyio.to_thread.run_sync(disk.asked.wait, 60)
        for _ in range(4):
            tasks.start_soon(ask)
        await all_tasks_blocked()
        disk.answers.set()

    assert [()] * 5 == notes


@pytest.mark.parametrize(
    ("spoilt", "note"),
    [
        ("config.yaml", "the node's own settings stand for the kubelet's configuration"),
        ("cpu_manager_state", "which CPUs the kubelet has is not known: cpu_manager_state cannot be trusted"),
        ("memory_manager_state", "which memory the kubelet has is not known: memory_manager_state cannot be trusted"),
        ("device-plugins/kubelet_internal_checkpoint", "which resources the kubelet has is not known"),
    ],
)
async def test_where_a_file_is_spoilt_we_answer_as_without_it_and_say_so(root: Path, spoilt: str, note: str) -> None:
    (root / spoilt).write_text('{"kind":')

    decision = await Node(root).what_if(ASKING)

    assert isinstance(decision, Admission)
    assert decision.explanation.notes[0].startswith(note)


async def test_without_any_file_our_own_rules_decide_in_mode_kubelet(tmp_path: Path) -> None:
    """Without any file the answer is that of our own rules in mode `kubelet`."""
    decision = await Node(tmp_path).what_if(ASKING)

    assert isinstance(decision, Admission)
    own = admit(STATE, ASKING, msgspec.structs.replace(OWN, mode=Mode.KUBELET))
    assert isinstance(own, Admission)
    assert own.allocations == decision.allocations
    assert 4 == len(decision.explanation.notes)


LATE = (
    "the node's own settings stand for the kubelet's configuration: the kubelet's files could not be read in time",
    f"the kubelet's files could not be read in time; {INSTEAD}",
)


async def test_a_disk_that_hangs_costs_one_thread_and_a_note_not_the_answer(tmp_path: Path, disk: SlowDisk) -> None:
    files = KubeletFiles(tmp_path / "config.yaml", tmp_path, OWN, seconds=0.05)
    state = STATE.apply(UsageObserved(node=STATE.node, epoch=1, revision=1, containers=()))
    threads = []
    for _ in range(3):
        known = await basis_from(files, state)
        assert (STATE.allocations, STATE.memory, LATE) == (known.state.allocations, known.state.memory, known.notes)
        threads.append(threading.active_count())

    assert [threads[0]] * 3 == threads


def test_the_kubelets_files_are_beside_its_plugin_directory() -> None:
    """The kubelet's files are beside its plugin directory, unless a setting says otherwise."""
    settings = AllocatorSettings(node=NodeName("n"), kubelet_dir="/var/lib/kubelet/device-plugins")
    told = msgspec.structs.replace(settings, kubelet_config="/etc/kubelet.yaml")

    assert Path("/var/lib/kubelet") == settings.kubelet_root
    assert Path("/var/lib/kubelet/config.yaml") == settings.kubelet_configuration
    assert Path("/etc/kubelet.yaml") == told.kubelet_configuration
    assert Path("/var/lib/kubelet/pod-resources/kubelet.sock") == settings.pod_resources


def test_the_times_of_files_are_asked_for_in_the_root_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done on the event loop, and the file system of a configuration elsewhere may hang."""
    asked: list[Path] = []
    monkeypatch.setattr(kubelet_files, "file_version", asked.append)
    root = tmp_path / "kubelet"
    KubeletFiles(tmp_path / "etc" / "config.yaml", root, AdmissionRules()).stamp()
    elsewhere = [*asked]
    asked.clear()
    KubeletFiles(root / "config.yaml", root, AdmissionRules()).stamp()

    assert {root / "config.yaml"} == {*asked} - {*elsewhere}
    assert 5 == len([path for path in elsewhere if path.is_relative_to(root)]) == len(elsewhere)
