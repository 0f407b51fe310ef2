"""The suites `kubelet/device_hints`, `kubelet/filter_affinity` and `kubelet/device_allocate`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.hints.device_hints import device_hints, device_hints_of_count
from topoalign.core.model.errors import DriverFault, NoFit
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.model.topology.device_sets import OfferedDevices
from topoalign.core.placement.device_choice import choose_devices, split_by_affinity
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.kubelet_errors import Answer
from topoalign.tools.conformance.kubelet_merge import Hint, all_written
from topoalign.tools.conformance.suite import CaseResult, Outcome

Listed = dict[DeviceID, tuple[int, ...] | None]


def in_text_order(devices: Listed) -> OfferedDevices:
    """The cases pick devices in ascending order of their ids; production picks in the order of this mapping."""
    return OfferedDevices({device: devices[device] for device in sorted(devices)})


def mask_or_none(nodes: list[int] | None) -> Mask | None:
    """NUMA node ids as a mask; None stays None."""
    return None if nodes is None else node_mask(nodes)


class HintsExpected(msgspec.Struct, frozen=True):
    """The expected hints; None means no preference."""

    hints: list[Hint] | None


class DeviceHintsCase(msgspec.Struct, frozen=True):
    """A case of `kubelet/device_hints`."""

    id: str
    numa_nodes: tuple[int, ...]
    devices: Listed
    available: list[DeviceID]
    requested: int
    expect: HintsExpected
    reusable: list[DeviceID] = []
    already_allocated: list[DeviceID] = []
    level: Literal["provider", "generate"] = "provider"


def hints(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/device_hints`."""
    return results(path, DeviceHintsCase, hinted)


def hinted(case: DeviceHintsCase) -> Outcome:
    """Expected and actual hints of a case."""
    devices = in_text_order(case.devices)
    mode = Mode.KUBELET
    if case.level == "provider":
        got = device_hints(
            devices, case.available, case.reusable, case.requested, case.numa_nodes, mode, held=case.already_allocated
        )
    else:
        got = device_hints_of_count(devices, case.available, case.reusable, case.requested, case.numa_nodes, mode)
    return case.expect.hints, all_written(got)


class SidesExpected(msgspec.Struct, frozen=True):
    """The expected groups of devices: on the nodes of the hint, on others, without NUMA nodes."""

    aligned: list[DeviceID]
    unaligned: list[DeviceID]
    no_affinity: list[DeviceID]


class SidesCase(msgspec.Struct, frozen=True):
    """A case of `kubelet/filter_affinity`."""

    id: str
    devices: Listed
    available: list[DeviceID]
    expect: SidesExpected
    hint_nodes: list[int] | None = None


def filter_affinity(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/filter_affinity`."""
    return results(path, SidesCase, parted)


def parted(case: SidesCase) -> Outcome:
    """Expected and actual groups of a case."""
    got = split_by_affinity(in_text_order(case.devices), case.available, mask_or_none(case.hint_nodes))
    return case.expect, SidesExpected(*map(list, got))


class Plugin(msgspec.Struct, frozen=True):
    """The answer of the plugin to GetPreferredAllocation, or that it fails."""

    preferred_available: bool = False
    answer: tuple[DeviceID, ...] = ()
    fails: bool = False


class PreferredCall(msgspec.Struct, frozen=True):
    """The expected call of GetPreferredAllocation."""

    available: list[DeviceID]
    must_include: list[DeviceID]
    size: int


class AllocateExpected(Answer, frozen=True):
    """The expected devices and call, or the error."""

    devices: list[DeviceID] | None = None
    preferred_call: PreferredCall | None = None


class AllocateCase(msgspec.Struct, frozen=True):
    """A case of `kubelet/device_allocate`."""

    id: str
    devices: Listed
    healthy: list[DeviceID]
    required: int
    expect: AllocateExpected
    allocated: list[DeviceID] = []
    reusable: list[DeviceID] = []
    hint_nodes: list[int] | None = None
    plugin: Plugin = Plugin()


def allocate(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/device_allocate`."""
    return results(path, AllocateCase, lambda case: (case.expect.by_kind, allocated(case)))


def allocated(case: AllocateCase) -> AllocateExpected:
    """Makes the choice as the device manager does, with the plugin of the case."""
    call: PreferredCall | None = None
    try:
        choice = choose_devices(
            ResourceName("example.com/dev"),
            in_text_order(case.devices),
            case.healthy,
            case.allocated,
            case.reusable,
            case.required,
            mask_or_none(case.hint_nodes),
        )
        if choice.is_open and case.plugin.preferred_available:
            call = PreferredCall(list(choice.available), list(choice.must_include), choice.size)
            if case.plugin.fails:
                raise DriverFault("boom", "none")
        return AllocateExpected(list(choice.complete(case.plugin.answer if call is not None else None)), call)
    except (NoFit, DriverFault) as failed:
        return AllocateExpected(preferred_call=call, error=failed.code)
