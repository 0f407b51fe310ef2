"""
Lists every difference between mode `kubelet` and mode `best`, in one table.

Both modes run the same code. If they differ, the code reads a field of the mode's Profile, and never compares the mode
itself. So each difference is one field here and the code that reads it. The default of a field is its value in mode
`kubelet`, and mode `best` has the opposite. docs/modes.md has an example of each.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.model.requests import Mode


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How one mode decides: a field for each difference, with the value of mode `kubelet` as its default."""

    # What a pod requests.
    exclusive_by_qos: bool = True
    """
    Only pods of QoS class Guaranteed get exclusive CPUs and aligned memory. Otherwise, each request that equals its
    limit counts; for CPUs, only a whole number.
    """
    drops_memory_of_init_containers: bool = True
    """If a pod is aligned as a whole, memory resources that no app container requests are not aligned."""
    asks_for_zero_devices: bool = True
    """A limit of 0 devices is a request like any other. Otherwise, it counts as no request."""
    aligns_jointly: bool = False
    """
    Devices that annotations allocate jointly are aligned together. Otherwise, each resource is aligned separately, and
    the devices are chosen together within that alignment.
    """
    asks_by_koordinators_names: bool = False
    """
    Koordinator's resource names for GPUs request GPUs. Otherwise, they are ignored, and a pod that also has
    Koordinator's annotations is refused.
    """

    # Preconditions of a decision.
    starts_kubelet: bool = True
    """
    A pod is refused if the kubelet would not start or would crash, for example because of too many NUMA nodes, or of
    hugepages that only some NUMA nodes have.
    """
    refuses_unknown_resources: bool = False
    """A pod that requests a resource that the node does not have is refused. Otherwise, the resource is ignored."""

    # What the hint providers answer.
    prefers_by_empty_machine: bool = True
    """A hint is preferred if no fewer NUMA nodes would suffice on an empty machine; otherwise, if no fewer do now."""
    silent_on_unplaced_devices: bool = True
    """
    If all devices of a resource are without NUMA nodes, there is no preference, even if there are too few devices.
    Otherwise, such a request cannot be met.
    """
    counts_devices_as_listed: bool = True
    """Devices count for the NUMA nodes that are listed to the kubelet. Otherwise, for the known ones of their GPUs."""
    seeks_units_by_gpu: bool = False
    """Units and slots count only on GPUs with enough for the container. Otherwise, all free ones of a NUMA node do."""
    silent_on_unmet_memory: bool = True
    """Memory that fits nowhere gets no hints, which counts as no preference. Otherwise, the request cannot be met."""
    offers_memory_without_cpus: bool = True
    """Memory of NUMA nodes without CPUs is offered, for example GPU memory or CXL memory."""
    aligns_by_socket: bool = True
    """The option align-by-socket has an effect."""

    # How the policy merges the hints.
    merges_combinations: bool = True
    """The kubelet's merge is used: over combinations of one hint of each list. Otherwise, the narrowest fit is used."""
    always_compares_distances: bool = False
    """Distances are compared if they are known. Otherwise, only with the option prefer-closest-numa-nodes."""
    compares_gpus_of_nodes: bool = False
    """Of equally narrow sets of NUMA nodes, the one with the best connected GPUs is used. Otherwise, the lowest."""
    narrows_after_merge: bool = False
    """Memory is allocated on as few NUMA nodes of the merged hint as possible. Otherwise, on all of them as a group."""

    # What is allocated to the container.
    gpus_first: bool = False
    """GPUs are chosen before other devices. Otherwise, resources are in the order of their names."""
    gives_plugins_context: bool = False
    """A question about preferred devices includes the container's devices of other resources and its NIC request."""
    takes_over_at_random: bool = True
    """If init containers have more devices than a container requests, it reuses random ones of them."""
    counts_averages: bool = True
    """CPUs per core, socket and last-level cache are averages, rounded down. Otherwise, each unit is counted."""
    counts_reusable_memory: bool = False
    """The check whether the aligned NUMA nodes have enough memory includes the memory that the pod can reuse."""
    gives_back_lowest_first: bool = True
    """Released memory returns to the lowest NUMA node first, regardless of how much was allocated on each."""
    gives_while_deciding: bool = True
    """Each container gets its resources before the next one is decided, so a refusal has to release them."""
    updates_devices_later: bool = True
    """If a container changes which devices are listed, this has no effect on the next containers of its pod."""


KUBELET = Profile()
"""Decides as the kubelet (v1.36.3) does, for predictions. docs/modes.md names two defects that are not repeated."""

BEST = Profile(**{name: not value for name, value in msgspec.structs.asdict(KUBELET).items()})
"""For admissions that topoalign decides itself."""

PROFILES: Mapping[Mode, Profile] = {Mode.KUBELET: KUBELET, Mode.BEST: BEST}


def profile_of(mode: Mode) -> Profile:
    """Returns the profile of a mode."""
    return PROFILES[mode]
