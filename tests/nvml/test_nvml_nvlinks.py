"""Pairs are made of what both ends say, whatever the shape of the machine."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.discovery.drivers.nvml.gpu_reading import DOWN, GPU_KIND, NPU_KIND, SWITCH_KIND, End, pair_ends

NAMES = [DeviceID(f"GPU-{i}") for i in range(5)]
ADDRESSES = {name: f"0000:0{i}:00.0" for i, name in enumerate(NAMES)}
SWITCH = "0000:c0:00.0"

targets = st.one_of(st.sampled_from(NAMES), st.sampled_from(["switch", "npu", "hidden", "foreign", "down"]))
machines = st.lists(st.lists(targets, max_size=6), min_size=1, max_size=5)
"""For each GPU, where its links lead."""


def end(target: str) -> End:
    match target:
        case "switch":
            return End(SWITCH, SWITCH_KIND)
        case "npu":
            return End("0004:00:00.0", NPU_KIND)
        case "hidden":
            return End(None, None)
        case "down":
            return DOWN
        case "foreign":
            return End("0000:99:00.0", GPU_KIND)
        case _:
            return End(ADDRESSES[DeviceID(target)], GPU_KIND)


@given(machines)
def test_pair_links_are_direct_ones_else_the_common_ones_to_the_switch(
    machine: list[list[str]],
) -> None:
    """Against a count by hand; every disagreement of two ends is reported once."""
    names = NAMES[: len(machine)]
    links = pair_ends({name: [end(t) for t in own] for name, own in zip(names, machine, strict=True)}, ADDRESSES)

    expected, odd = {}, 0
    counts = {name: Counter(own) for name, own in zip(names, machine, strict=True)}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            one, other = counts[a][b], counts[b][a]
            odd += one != other
            switched = min(counts[n]["switch"] + counts[n]["hidden"] for n in (a, b))
            number = min(one, other) if one or other else switched
            if number:
                expected[a, b] = number
    assert expected == links.pairs
    assert odd == len(links.findings)
    to_switch = {name: counts[name]["switch"] + counts[name]["hidden"] for name in names}
    assert {name: count for name, count in to_switch.items() if count} == links.to_switch
    assert {name: counts[name]["down"] for name in names} == links.down
