"""Whose processes use a GPU, by what is held and where they run; nothing is guessed."""

from collections.abc import Sequence
from itertools import count

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from slot_support import in_slots
from use_support import (
    GIB,
    INSTANCES,
    MACHINE,
    SHARED,
    UIDS,
    held,
    in_pod,
    measurement,
    on_host,
    owner,
    process,
    shares,
    state_of,
    use,
)

from topoalign.core.model.allocations import Displaced
from topoalign.core.model.events import Allocation
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.processes import GpuProcess, ProcessIdentity
from topoalign.core.usage.attribution import DeviceShares, NodeShares, attribute_use

TRAIN, INFER = owner("train"), owner("infer")


def test_a_holder_has_the_memory_and_time_of_all_its_processes() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    mine = process(41, 12 * GIB, in_pod(UIDS[0]), 60), process(42, GIB, in_pod(UIDS[0]), 30)
    found = shares(state, use("GPU-0", *mine, used=14 * GIB, utilization=90))["GPU-0"]

    (holder,) = found.holders
    assert (TRAIN, ("a-1",), ("GPU-0",)) == (holder.owner, holder.allocations, holder.devices)
    assert (100, 80 * GIB, 67 * GIB) == (holder.cores, holder.memory, holder.memory_left)
    assert (13 * GIB, 90, mine) == (holder.use.memory, holder.use.utilization, holder.use.processes)
    assert (80 * GIB, 14 * GIB, 90, ()) == (found.memory, found.memory_used, found.utilization, found.others)


def test_a_holder_that_runs_nothing_uses_nothing() -> None:
    (holder,) = shares(state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0])), use("GPU-0"))["GPU-0"].holders

    assert (0, 0, ()) == (holder.use.memory, holder.use.utilization, holder.use.processes)


def test_who_holds_nothing_of_a_gpu_is_shown_beside_its_holders() -> None:
    """A process of the host, one of a pod without any GPU, one of a pod that holds another GPU, one that nobody knows."""
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]), held(2, "GPU-1", of=INFER, uid=UIDS[1]))
    found = shares(
        state,
        use(
            "GPU-0",
            process(1, GIB, on_host()),
            process(2, GIB, in_pod(UIDS[2], "spy")),
            process(3, GIB, in_pod(UIDS[1], "side")),
            process(4, GIB, None),
            process(5, GIB, ProcessIdentity(command="x")),
        ),
        use("GPU-1"),
    )

    others = {each.pid: other for other in found["GPU-0"].others for each in other.use.processes}
    assert {1: "host", 2: "pod", 3: "pod", 4: "unknown", 5: "unknown"} == {pid: o.where for pid, o in others.items()}
    assert {1: None, 2: None, 3: owner("infer", "side"), 4: None, 5: None} == {
        pid: o.owner for pid, o in others.items()
    }
    assert ("/user.slice", UIDS[2], "c" * 64) == (others[1].cgroup, others[2].pod_uid, others[2].container_id)
    assert [0, 0] == [row.holders[0].use.memory for row in (found["GPU-0"], found["GPU-1"])]


def test_another_container_of_the_holders_pod_is_no_holder() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    found = shares(state, use("GPU-0", process(1, GIB, in_pod(UIDS[0], "sidecar"))))["GPU-0"]

    assert 0 == found.holders[0].use.memory
    assert owner("train", "sidecar") == found.others[0].owner


def test_a_pod_made_again_under_its_name_is_another_pod() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    found = shares(state, use("GPU-0", process(1, GIB, in_pod(UIDS[1]))))["GPU-0"]

    assert (0, "pod", None) == (found.holders[0].use.memory, found.others[0].where, found.others[0].owner)


def test_a_container_without_name_is_its_pods_only_holder_or_none() -> None:
    """With two holders of one pod it is not known what either of them uses: 0 would be wrong for one of them."""
    one = state_of(held(1, "GPU-0::0", of=TRAIN, uid=UIDS[0], resource=SHARED))
    other = held(2, "GPU-0::1", of=owner("train", "second"), uid=UIDS[0], resource=SHARED)
    nameless = use("GPU-0", process(1, GIB, in_pod(UIDS[0], "")))

    assert GIB == shares(one, nameless)["GPU-0"].holders[0].use.memory
    both = shares(state_of(*one.allocations.values(), other), nameless)["GPU-0"]
    assert [None, None] == [holder.use.memory for holder in both.holders]
    assert [(1,)] == [tuple(each.pid for each in other.use.processes) for other in both.others]


def test_time_slices_are_told_apart_and_have_no_amount() -> None:
    state = state_of(
        held(1, "GPU-1::0", "GPU-1::2", of=TRAIN, uid=UIDS[0], resource=SHARED),
        held(2, "GPU-1::1", of=INFER, uid=UIDS[1], resource=SHARED),
    )
    found = shares(state, use("GPU-1", process(1, 3 * GIB, in_pod(UIDS[0]), 20), process(2, GIB, in_pod(UIDS[1]), 70)))[
        "GPU-1"
    ]

    assert [(None, None, None)] * 2 == [(each.cores, each.memory, each.memory_left) for each in found.holders]
    assert [("GPU-1::0", "GPU-1::2"), ("GPU-1::1",)] == [each.devices for each in found.holders]
    assert [(3 * GIB, 20), (GIB, 70)] == [(each.use.memory, each.use.utilization) for each in found.holders]


def test_slots_have_the_recorded_amount_or_an_equal_part() -> None:
    """Of a GPU of 80 GiB in ten slots; what else is a share of a GPU has no amount."""
    slots = {DeviceID("GPU-0::3"): Amount(cores=40, memory=6 * GIB), DeviceID("GPU-1::0"): Amount(cores=0, memory=GIB)}
    state = state_of(
        msgspec.structs.replace(held(1, *slots, of=TRAIN, uid=UIDS[0]), slots=slots),
        held(2, "GPU-0::7", of=INFER, uid=UIDS[1]),
        held(3, "GPU-2::7", of=INFER, uid=UIDS[1]),
        machine=in_slots(MACHINE, gpus=2),
    )
    found = shares(state, use("GPU-0", process(1, 7 * GIB, in_pod(UIDS[0]))), use("GPU-1"), use("GPU-2"))

    assert [(40, 6 * GIB), (10, 8 * GIB)] == [(each.cores, each.memory) for each in found["GPU-0"].holders]
    assert [(0, GIB)] == [(each.cores, each.memory) for each in found["GPU-1"].holders]
    assert [(None, None)] == [(each.cores, each.memory) for each in found["GPU-2"].holders]
    assert [0, 8 * GIB] == [each.memory_left for each in found["GPU-0"].holders]


def test_each_mig_instance_has_its_own_holders() -> None:
    state = state_of(
        held(1, "MIG-0", of=TRAIN, uid=UIDS[0]), held(2, "MIG-1::0", of=INFER, uid=UIDS[1], resource=SHARED)
    )
    found = shares(
        state,
        use("GPU-2", used=3 * GIB),
        use("MIG-0", process(1, GIB, in_pod(UIDS[0]))),
        use("MIG-1", process(2, GIB, in_pod(UIDS[0]))),
    )

    assert ["GPU-0", "GPU-1", "GPU-2", "MIG-0", "MIG-1"] == list(found)
    assert ((), (), 3 * GIB) == (found["GPU-2"].holders, found["GPU-2"].others, found["GPU-2"].memory_used)
    (train,), (infer,) = found["MIG-0"].holders, found["MIG-1"].holders
    assert (100, INSTANCES[0].memory, GIB) == (train.cores, train.memory, train.use.memory)
    assert (None, None, 0) == (infer.cores, infer.memory, infer.use.memory)
    assert TRAIN == found["MIG-1"].others[0].owner


def test_several_allocations_of_a_container_are_one_holder() -> None:
    """As with one resource for cores and one for memory: the kubelet asks for each by itself."""
    cores = held(1, *(f"GPU-0::c{n}" for n in range(20)), of=TRAIN, uid=UIDS[0])
    memory = held(2, *(f"GPU-0::m{n}" for n in range(16)), of=TRAIN, uid=UIDS[0])
    whole = held(3, *(f"GPU-1::c{n}" for n in range(100)), of=INFER, uid=UIDS[1])
    found = shares(state_of(cores, memory, whole), use("GPU-0", process(1, 5 * GIB, in_pod(UIDS[0]))))

    (holder,), (alone,) = found["GPU-0"].holders, found["GPU-1"].holders
    assert (("a-1", "a-2"), 20, 4 * GIB, 0) == (holder.allocations, holder.cores, holder.memory, holder.memory_left)
    assert (100, found["GPU-1"].memory) == (alone.cores, alone.memory)


def test_what_is_not_told_is_unknown_and_not_zero() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]), held(2, "GPU-1", of=INFER))
    runs = process(1, GIB, in_pod(UIDS[0]))

    def used(*processes: GpuProcess, finding: str = "", left_out: int = 0) -> int | None:
        row = use("GPU-0", *processes)
        return shares(state, row, finding=finding, left_out=left_out)["GPU-0"].holders[0].use.memory

    assert GIB == used(runs)
    assert None is used(process(1, None, in_pod(UIDS[0])), runs), "the driver does not tell of one of them"
    assert None is used(process(1, GIB, None), finding="not in the node's PID namespace")
    assert 0 == used(finding="not in the node's PID namespace"), "nothing runs on this one"
    assert None is used(runs, left_out=1)
    unreadable = msgspec.structs.replace(use("GPU-0"), processes=None)
    assert None is shares(state, unreadable)["GPU-0"].holders[0].use.memory
    unbound = shares(state, use("GPU-1", process(1, GIB, in_pod(UIDS[3]))))["GPU-1"]
    assert (None, "pod") == (unbound.holders[0].use.memory, unbound.others[0].where), (
        "the pod of the holder is not known"
    )


def test_a_gpu_that_was_not_measured_is_listed_with_its_holders() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    found = shares(state, use("GPU-1"))

    assert ("it was not measured", None, None) == (
        found["GPU-0"].failure,
        found["GPU-0"].memory_used,
        found["GPU-0"].holders[0].use.memory,
    )
    assert "" == found["GPU-1"].failure


def test_a_container_that_was_not_seen_to_end_is_named() -> None:
    former = Displaced(
        allocation=AllocationID("a-0"), owner=TRAIN, pod_uid=UIDS[0], devices={GPU: (DeviceID("GPU-0"),)}
    )
    now = msgspec.structs.replace(held(1, "GPU-0", of=INFER, uid=UIDS[1]), displaced=(former,))
    found = shares(state_of(now), use("GPU-0", process(1, GIB, in_pod(UIDS[0]))))["GPU-0"]

    assert TRAIN == found.others[0].owner


def test_shares_survive_json() -> None:
    state = state_of(held(1, "GPU-0", of=TRAIN, uid=UIDS[0]))
    found = attribute_use(state, measurement(use("GPU-0", process(1, GIB, in_pod(UIDS[0])), process(2, None, None))))

    assert found == msgspec.json.decode(msgspec.json.encode(found), type=NodeShares)


DEVICES = ("GPU-0", "GPU-0::0", "GPU-0::1", "GPU-1", "GPU-2", "MIG-0", "MIG-0::0", "MIG-1")
NAMES = ("main", "side")


@st.composite
def nodes(draw: st.DrawFn) -> tuple[tuple[Allocation, ...], dict[str, tuple[GpuProcess, ...]]]:
    allocations = []
    for number in range(draw(st.integers(0, 5))):
        pod = draw(st.integers(0, 2))
        of = draw(st.sampled_from([None, *(owner(f"pod-{pod}", name) for name in NAMES)]))
        uid = draw(st.sampled_from(["", UIDS[pod]]))
        devices = draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True))
        allocations.append(held(number, *devices, of=of, uid=uid))
    pids = count(1)
    runs = st.builds(
        process,
        st.builds(lambda: next(pids)),
        st.sampled_from([None, 1, 2, 4, 8]),
        st.none() | st.just(on_host()) | st.builds(in_pod, st.sampled_from(UIDS), st.sampled_from(["", *NAMES])),
    )
    rows = ("GPU-0", "GPU-1", "MIG-0", "MIG-1")
    return tuple(allocations), {row: tuple(draw(st.lists(runs, max_size=4))) for row in rows}


def on(row: str, device: str) -> bool:
    """By hand: GPU 2 is the one with instances."""
    return device == row or device.startswith(f"{row}::") or (row.startswith("MIG") and device == "GPU-2")


@given(nodes())
def test_every_process_is_shown_once_and_with_whom_the_rule_says(
    case: tuple[tuple[Allocation, ...], dict[str, tuple[GpuProcess, ...]]],
) -> None:
    """The rules by hand: what of a row is held by whom; which containers of a process's pod are these, is it one of them."""
    allocations, running = case
    found = shares(state_of(*allocations), *(use(row, *processes) for row, processes in running.items()))

    for row, shown in found.items():
        assert held_of(row, allocations) == [holder.devices for holder in shown.holders]
    for row, processes in running.items():
        shown = found[row]
        uses = (*(holder.use for holder in shown.holders), *(other.use for other in shown.others))
        listed = [p.pid for each in uses for p in each.processes]
        assert sorted(p.pid for p in processes) == sorted(listed)
        for p in processes:
            assert expected(p, allocations, row) == holder_shown(p, shown), p
        for holder in shown.holders:
            told = [p.memory for p in holder.use.processes]
            if holder.use.memory is not None:
                assert sum(m for m in told if m is not None) == holder.use.memory
                assert None not in told


def held_of(row: str, allocations: Sequence[Allocation]) -> list[tuple[str, ...]]:
    """The devices of each container, the one first that was given some first."""
    holders = dict[object, list[str]]()
    for each in allocations:
        if mine := [device for device in sorted(each.device_ids) if on(row, device)]:
            holders.setdefault((each.pod_uid, each.owner or each.id), []).extend(mine)
    return [*map(tuple, holders.values())]


def expected(p: GpuProcess, allocations: Sequence[Allocation], row: str) -> set[object]:
    """The container that has the process: pod UID and owner, or the id of an allocation without owner. Empty: none."""
    if p.identity is None or not p.identity.pod_uid:
        return set()
    having = {
        (each.pod_uid, each.owner or each.id)
        for each in allocations
        if each.pod_uid == p.identity.pod_uid and any(on(row, device) for device in each.device_ids)
    }
    if p.identity.container:
        return {who for who in having if not isinstance(who[1], str) and who[1].container == p.identity.container}
    return set(having) if len(having) == 1 else set()


def holder_shown(p: GpuProcess, row: DeviceShares) -> set[object]:
    return {
        (holder.pod_uid, holder.owner or holder.allocations[0])
        for holder in row.holders
        if p.pid in {each.pid for each in holder.use.processes}
    }
