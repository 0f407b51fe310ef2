"""What is announced of a kubelet whose files cannot be read in time."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from device_allocations_support import ledger_of
from kubelet_support import pod, two_nodes

from topoalign.allocator.requests.kubelet_files import (
    LATE,
    PAUSE_SECONDS,
    POLL_SECONDS,
    REREAD_SECONDS,
    KubeletFiles,
    KubeletWatch,
)
from topoalign.core.admission.prediction import predict
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.state.fold import NodeState
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
CONFIG = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n"


class SlowFiles(KubeletFiles):
    """Files that are read at once, or too late; counts the readings."""

    late = False
    readings = 0

    async def read(self, state: NodeState, ended: Sequence[AllocationID] = ()) -> KubeletObserved:
        self.readings += 1
        self._seconds = 0.0 if self.late else 60.0
        return await super().read(state, ended)


class Node:
    def __init__(self, root: Path) -> None:
        (root / "device-plugins").mkdir()
        (root / "config.yaml").write_text(CONFIG)
        self.clock = ManualClock()
        self.ledger = ledger_of(two_nodes(gpus=2, nics=0), self.clock)
        self.ledger.observe(containers=())
        self.files = SlowFiles(root / "config.yaml", root, AdmissionRules())
        self.ended: Sequence[Allocation] = ()
        """What the record still has of containers that have ended."""
        self.watch = KubeletWatch(self.ledger, self.files, self.clock, ended=self.over)

    async def over(self) -> Sequence[Allocation]:
        return self.ended

    async def poll(self, seconds: float = REREAD_SECONDS) -> KubeletObserved:
        """What is known of the kubelet after a poll so many seconds later."""
        await self.clock.advance(seconds)
        await self.watch.poll()
        usage = self.ledger.state.usage
        assert usage is not None and usage.kubelet is not None
        return usage.kubelet

    @property
    def notes(self) -> tuple[str, ...]:
        return predict(self.ledger.state, pod("next", gpus=1), self.clock.wall()).explanation.notes


async def test_a_late_reading_leaves_what_was_read_last_and_says_so(tmp_path: Path) -> None:
    """The note names the time of the last reading, and is the same at every late one."""
    it = Node(tmp_path)
    good, before = await it.poll(), it.notes
    it.files.late = True
    first, revised = await it.poll(), it.ledger.state.usage
    notes = it.notes
    await it.poll()
    later = it.ledger.state.usage
    it.files.late = False
    after = await it.poll(PAUSE_SECONDS)

    assert ("restricted", good.rules, "") == (good.rules.policy, first.rules, first.unknown)
    assert f"{LATE}: what was read at 2023-11-14T22:13:25Z counts" == first.stale
    assert (first.stale, *before) == notes
    assert revised is later, "nothing new is announced"
    assert good == after


async def test_which_containers_have_ended_is_known_although_the_files_are_late(tmp_path: Path) -> None:
    """PodResources has it, and not the files."""
    it = Node(tmp_path)
    it.ledger.grant([Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"),)})])
    first = (await it.poll()).ended
    it.files.late = True
    it.ended = tuple(it.ledger.state.allocations.values())
    late = (await it.poll()).ended
    it.ended = ()
    running = (await it.poll(PAUSE_SECONDS)).ended

    assert [(), (AllocationID("a"),), ()] == [first, late, running]


async def test_rules_that_were_never_read_are_said_to_be_unknown(tmp_path: Path) -> None:
    """They are the allocator's own, whatever the kubelet has."""
    it = Node(tmp_path)
    it.files.late = True
    known = await it.poll()

    assert (AdmissionRules().policy, LATE) == (known.rules.policy, known.unknown)
    assert known.rules.unknown.startswith("the node's own settings stand for the kubelet's configuration")
    assert known.rules.unknown in it.notes


async def test_a_slow_disk_is_read_again_after_a_pause(tmp_path: Path) -> None:
    """At the first poll after ten seconds, and not at every poll."""
    it = Node(tmp_path)
    it.files.late = True
    when: list[float] = []
    for number in range(100):
        had = it.files.readings
        await it.poll(POLL_SECONDS)
        when += [number * POLL_SECONDS] * (it.files.readings - had)

    pauses = [after - before for before, after in pairwise(when)]
    assert 4 == len(pauses)
    assert all(PAUSE_SECONDS <= pause < PAUSE_SECONDS + 2 * POLL_SECONDS for pause in pauses)
