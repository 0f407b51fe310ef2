"""Containers of low priority wait while one of high priority computes on their GPU, and no longer than that."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_node_support import EACH, LIBRARIES, NAME, Ask, HamiCoreNode, built, put_region

from topoalign.allocator.containers.hami_core import feedback
from topoalign.allocator.containers.hami_core.feedback import Feedback
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.sharing.priorities import Launches, next_notes


def shown_region(path: Path, library: str = "v2.9.0") -> list[int]:
    """What the library of this version of HAMi would read: recent kernel, whether cores are limited, priority."""
    shown = subprocess.run([built(library), path, "show"], check=True, capture_output=True)
    return [*map(int, shown.stdout.split())]


pytestmark = pytest.mark.anyio
ON, OFF = lambda: True, lambda: False
WAITS, RUNS = -1, 0


async def with_files(it: HamiCoreNode, library: str = "v2.9.0", **priorities: int) -> dict[str, Path]:
    """Pods on one GPU, each with a file that has just been made: in it, a kernel was launched."""
    files = {}
    for name, priority in priorities.items():
        await it.run_pod(name, Ask(memory=100, cores=10))
        (gpu,) = map(base_of, it.slots_of(name)["c0"])
        files[name] = put_region(it.cache(name) / NAME, gpu, "1:0:0:0:0:0", priority=priority, library=library)
    assert 1 == len({base_of(slot) for name in priorities for slot in it.slots_of(name)["c0"]})
    return files


def feedback_of(it: HamiCoreNode, *, on: bool = True) -> Feedback:
    return Feedback(lambda: f"{it.root}/", ON if on else OFF, lambda: it.ledger.state)


def write(path: Path, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def recent(*paths: Path, library: str = "v2.9.0") -> list[int]:
    return [shown_region(path, library)[0] for path in paths]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_low_priority_waits_while_high_priority_computes(library: str) -> None:
    """The files of the two are as they were but for these four bytes."""
    async with HamiCoreNode.running() as (it, _):
        files = await with_files(it, library, high=0, low=1)
        before = {name: path.read_bytes() for name, path in files.items()}
        told = feedback_of(it)
        seen = []
        for _ in range(3):
            await told.update_notes()
            seen.append(recent(files["high"], files["low"], library=library))

        assert [[1, WAITS], [0, RUNS], [0, RUNS]] == seen
        at = 2_008_936 if library == "v2.8.1" else 2_008_904
        for name, path in files.items():
            after = path.read_bytes()
            assert (before[name][:at], before[name][at + 4 :]) == (after[:at], after[at + 4 :])


async def test_containers_of_other_gpus_and_of_equal_priority_wait_for_nobody() -> None:
    async with HamiCoreNode.running() as (it, _):
        files = await with_files(it, first=1, second=1)
        await it.run_pod("other", Ask(3, memory=EACH))
        gpus = ",".join({base_of(slot) for slot in it.slots_of("other")["c0"]})
        (own,) = {base_of(slot) for slot in it.slots_of("first")["c0"]}
        lies = put_region(it.cache("other") / NAME, f"{gpus},{own}", priority=0)
        await feedback_of(it).update_notes()

        assert own not in gpus
        assert [1, 1, 1] == recent(*files.values(), lies)


async def test_what_was_told_is_taken_back() -> None:
    """When it is switched off, when the agent ends, when it starts without, and of a container that is in no record."""
    async with HamiCoreNode.running() as (it, _):
        files = await with_files(it, high=0, low=1)
        is_on = [True]

        async def run() -> None:
            await Feedback(lambda: str(it.root), lambda: is_on[0], lambda: it.ledger.state).run(it.clock)

        async def until(expected: int) -> None:
            while recent(files["low"]) != [expected]:
                await it.clock.advance(1)

        async with anyio.create_task_group() as running:
            running.start_soon(run)
            await until(WAITS)
            is_on[0] = False
            await until(RUNS)
            is_on[0] = True
            write(files["high"], 2_008_904, b"\2")
            await until(WAITS)
            running.cancel_scope.cancel()
        assert [RUNS] == recent(files["low"])
        for on in (False, True):
            write(files["low"], 2_008_904, b"\xff\xff\xff\xff")
            it.ledger.state = it.ledger.state if not on else msgspec.structs.replace(it.ledger.state, allocations={})
            await feedback_of(it, on=on).update_notes()
            assert [RUNS] == recent(files["low"])


async def test_nothing_but_a_region_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HamiCoreNode.running() as (it, _):
        files = await with_files(it, high=0, low=1, linked=1, old=1, cut=1, gone=1)
        target = it.root.parent / "target"
        files["linked"].rename(target)
        files["linked"].symlink_to(target)
        write(files["old"], 8, b"\3")
        os.truncate(files["cut"], 2_008_900)
        files["gone"].unlink()
        before = {path: path.read_bytes() for path in (target, files["old"], files["cut"])}
        await feedback_of(it).update_notes()

        assert [1, WAITS] == recent(files["high"], files["low"])
        assert before == {path: path.read_bytes() for path in before}
        assert not files["gone"].exists()


async def test_a_launch_between_reading_and_writing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted down over it, the next round would take the container for one that does nothing."""
    async with HamiCoreNode.running() as (it, _):
        files = await with_files(it, high=0)
        told, write_note = feedback_of(it), feedback.write_note
        await told.update_notes()
        assert [1] == recent(files["high"])

        def late(root: Path, name: str, before: int, note: int) -> None:
            write(files["high"], 2_008_904, b"\2")
            write_note(root, name, before, note)

        monkeypatch.setattr(feedback, "write_note", late)
        await told.update_notes()
        assert [2] == recent(files["high"])


GPUS = [DeviceID(f"GPU-{n}") for n in range(3)]


@given(
    st.lists(
        st.builds(
            Launches,
            st.frozensets(st.sampled_from(GPUS), max_size=3),
            st.integers(-1, 2),
            st.integers(-1, 3),
        ),
        max_size=6,
    )
)
def test_notes_are_those_of_the_rule_step_by_step(containers: list[Launches]) -> None:
    assert by_rule(containers) == next_notes(containers)


def by_rule(containers: Sequence[Launches]) -> list[int]:
    """As the monitor's rule says it: how many compute on each GPU with each priority, then one container after another."""
    notes = [each.recent_kernel for each in containers]
    computing: dict[tuple[DeviceID, int], int] = {}
    for place, each in enumerate(containers):
        if notes[place] > 0:
            notes[place] -= 1
            if notes[place] > 0 and each.priority >= 0:
                for gpu in each.gpus:
                    computing[gpu, each.priority] = computing.get((gpu, each.priority), 0) + 1
    for place, each in enumerate(containers):
        waits = any(computing.get((gpu, higher), 0) > 0 for gpu in each.gpus for higher in range(max(0, each.priority)))
        if waits and notes[place] >= 0:
            notes[place] = -1
        elif not waits and notes[place] < 0:
            notes[place] = 0
    return notes
