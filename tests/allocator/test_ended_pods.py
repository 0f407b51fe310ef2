"""What a pod had that has ended is free within a second: in what is published, in predictions, and for the next pod."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kubelet_support import NODE, pod, two_nodes
from prediction_support import CONFIG, PredictingNode

from topoalign.allocator.requests.kubelet_files import REREAD_SECONDS
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.ids import Namespace, PodName
from topoalign.core.model.requests import ConfirmRequest

pytestmark = pytest.mark.anyio
MACHINE = two_nodes(gpus=2, nics=0)
DEFAULT = Namespace("default")
TRAIN, UID = PodName("train"), "uid-train"
NEXT = pod("next", gpus=2)


class Node(PredictingNode):
    lists = 0
    """How often PodResources was asked for all pods."""

    async def pass_second(self) -> None:
        await self.next_poll()
        await self.next_poll()

    async def runs(self, *, volumes: bool = True) -> None:
        """A pod with both GPUs, CPUs and memory of its own runs, and the listener knows."""
        admitted = await self.kubelet.admit(pod(TRAIN, gpus=2, cpus=3), UID, volumes=volumes)
        assert isinstance(admitted, Admission)
        await self.allocations.reconcile()
        await self.pass_second()

    def free_memory(self) -> bool:
        """Whether the listener knows of no memory that is given away."""
        return not any(any(use.reserved.values()) for use in self.known.memory.values())

    async def confirmed(self, *terminated: str) -> Decision:
        """What the node answers to a registry that knows these pods as terminated."""
        return await self.predictions.confirm(ConfirmRequest(node=NODE, pod=NEXT, terminated=terminated))


@asynccontextmanager
async def node(monkeypatch: pytest.MonkeyPatch, *, inotify: bool = False) -> AsyncIterator[Node]:
    """A node that has polled. `inotify`: whether its agent watches the kubelet's directories with inotify."""
    config = CONFIG.format(policy="best-effort", scope="container", options="")
    async with Node.running(MACHINE, config) as (it, tasks):
        if inotify:
            tasks.start_soon(it.changes.run)
        counted(it)
        tasks.start_soon(it.watch.run)
        await it.next_poll()
        yield it


def counted(node: Node) -> None:
    """The node counts its questions to PodResources."""
    listing = node.pod_resources.listing

    async def counting(seconds: float | None = None) -> object:
        node.lists += 1
        return await listing(seconds)

    node.pod_resources.listing = counting  # type: ignore[assignment,method-assign]  # a method is replaced by a counter


@pytest.mark.parametrize("inotify", [False, True], ids=["polled", "inotify"])
@pytest.mark.parametrize("kind", ["volumes", "no-volumes", "deleted"])
async def test_an_ended_pod_is_reported_free_within_a_second(
    kind: str, inotify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    No file that is watched changes when a pod succeeds or fails: its volumes are torn down inside its directory, and one
    without volumes leaves no trace. Its GPUs, CPUs and memory are free at the same time for everybody who predicts.
    """
    async with node(monkeypatch, inotify=inotify) as it:
        await it.runs(volumes=kind != "no-volumes")
        (held,), before, refused = it.ledger.state.allocations, it.known, it.predicted(NEXT)
        await (it.kubelet.remove(DEFAULT, TRAIN) if kind == "deleted" else it.kubelet.end(DEFAULT, TRAIN))
        await it.pass_second()

        assert ((), [UID]) == (before.ended, [each.pod_uid for each in before.entries])
        assert isinstance(refused, Refusal)
        assert ((held,), ()) == (it.known.ended, it.known.entries)
        assert it.free_memory()
        assert isinstance(it.predicted(NEXT), Admission)


async def test_an_ended_pod_without_volumes_stays_free_after_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory does not show that it has ended, and once its record is released nothing else does."""
    async with node(monkeypatch) as it:
        await it.runs(volumes=False)
        await it.kubelet.end(DEFAULT, TRAIN)
        await it.pass_second()
        for _ in range(4):  # two until the release, and one reading after it
            await it.allocations.reconcile()
            await it.next_poll(REREAD_SECONDS)

        assert {} == it.ledger.state.allocations
        assert () == it.known.entries
        assert it.free_memory()


async def test_a_pod_that_a_new_kubelet_does_not_list_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that has just started lists fewer pods than run."""
    async with node(monkeypatch) as it:
        await it.runs()
        with monkeypatch.context() as patched:
            patched.setattr(it.kubelet, "listed_pods", lambda: ())
            await it.kubelet.restart()
            for _ in range(3):
                await it.pass_second()

            assert ((), [UID]) == (it.known.ended, [each.pod_uid for each in it.known.entries])
            assert isinstance(it.predicted(NEXT), Refusal)


async def test_an_agent_asks_for_ended_pods_only_while_it_holds_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(monkeypatch) as it:
        for _ in range(3):
            await it.pass_second()
        idle = it.lists
        await it.runs()
        it.lists = 0
        for _ in range(3):
            await it.pass_second()

        assert 0 == idle
        assert 6 <= it.lists <= 8  # and with each reading of the files


async def test_a_confirm_that_names_a_terminated_pod_reads_the_kubelet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file has changed since the last reading, a moment ago."""
    async with node(monkeypatch) as it:
        await it.runs()
        await it.kubelet.end(DEFAULT, TRAIN)
        before, after = await it.confirmed(), await it.confirmed(UID)

        assert isinstance(before, Refusal) and "NotEnoughDevices" == before.code
        assert isinstance(after, Admission)


async def test_a_terminated_pod_that_the_kubelet_shows_holds_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server may show a pod as deleted whose containers still stop."""
    async with node(monkeypatch) as it:
        await it.runs()

        assert isinstance(await it.confirmed(UID), Refusal)


async def test_a_pod_gets_the_gpus_of_an_ended_one_before_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(monkeypatch) as it:
        await it.runs()
        await it.kubelet.end(DEFAULT, TRAIN)
        recorded = [each.owner.pod for each in it.ledger.state.allocations.values() if each.owner is not None]

        assert [TRAIN] == recorded
        assert isinstance(await it.kubelet.admit(NEXT), Admission)
