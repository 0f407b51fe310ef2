"""
Lists every difference between mode `kubelet` and mode `best`, in one table.

Both modes run the same code. Where they differ, the code asks a field of the mode's Profile and never which mode it is, so
a difference is a field here and the place that reads it. The default of a field is its value in mode `kubelet`, and mode
`best` has the opposite. docs/modes.md has an example of each.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.model.requests import Mode


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How decisions of one mode are made: a field for each difference, with the value of mode `kubelet` as its default."""

    # What a pod asks for.
    exclusive_by_qos: bool = True
    """CPUs and memory are for pods of QoS class Guaranteed; otherwise for each request equal to its limit, CPUs whole."""
    drops_memory_of_init_containers: bool = True
    """For a pod as a whole, memory resources that no app container asks for are left out."""
    asks_for_zero_devices: bool = True
    """A limit of 0 devices is asked for like any other; otherwise it counts as not asked."""
    aligns_jointly: bool = False
    """Devices that annotations name together are aligned together; otherwise each resource by itself, and they are chosen
    together within that alignment."""
    asks_by_koordinators_names: bool = False
    """Koordinator's names for GPUs ask for GPUs; otherwise they are passed over, and a pod with annotations is refused."""

    # What has to hold before a pod is decided.
    starts_kubelet: bool = True
    """What keeps the kubelet from starting or running refuses the pod: too many NUMA nodes, unevenly known hugepages."""
    refuses_unknown_resources: bool = False
    """A resource that the node does not have refuses the pod; otherwise it is passed over."""

    # What the hint providers answer.
    prefers_by_empty_machine: bool = True
    """A hint is preferred if an empty machine could not do with fewer NUMA nodes; otherwise if nothing narrower fits now."""
    silent_on_unplaced_devices: bool = True
    """Of devices without NUMA nodes there is no opinion even where there are too few; otherwise they cannot be met."""
    counts_devices_as_listed: bool = True
    """Devices count near the NUMA nodes that they are listed with to the kubelet; otherwise near those of their GPUs."""
    seeks_units_by_gpu: bool = False
    """Units and slots are sought where GPUs have enough for the container; otherwise counted per NUMA node."""
    silent_on_unmet_memory: bool = True
    """Memory that fits nowhere is left out, which counts as no opinion; otherwise it cannot be met."""
    offers_memory_without_cpus: bool = True
    """Memory of NUMA nodes without CPUs is offered: a GPU's own, CXL."""
    aligns_by_socket: bool = True
    """The option align-by-socket counts."""

    # How the policy merges the hints.
    merges_combinations: bool = True
    """The merge is the kubelet's, over combinations of one hint of each list; otherwise the narrowest fit."""
    always_compares_distances: bool = False
    """Distances count wherever they are known; otherwise only with the option prefer-closest-numa-nodes."""
    compares_gpus_of_nodes: bool = False
    """Of equally narrow sets of NUMA nodes the one is taken that has the best connected GPUs; otherwise the lowest."""
    narrows_after_merge: bool = False
    """Memory is of as few as possible of the NUMA nodes of the merge; otherwise of all of them."""

    # What the container is given.
    gpus_first: bool = False
    """GPUs are chosen before other devices; otherwise all are in the order of their names."""
    gives_plugins_context: bool = False
    """A preference among devices is asked with what else the container has and wants."""
    takes_over_at_random: bool = True
    """Which of too many devices of init containers are taken over is left to chance."""
    counts_averages: bool = True
    """CPUs per core, socket and last-level cache are averages, rounded down; otherwise they are counted."""
    counts_reusable_memory: bool = False
    """Whether the NUMA nodes of the alignment have enough memory is judged with what the pod may use again."""
    gives_back_lowest_first: bool = True
    """Memory is given back from the lowest NUMA node on, whatever was taken of each."""
    gives_while_deciding: bool = True
    """A container has what it was given before the next one is decided, so a refusal has something to undo."""
    updates_devices_later: bool = True
    """What is left of a GPU after one container is not listed anew before the next one of its pod is aligned."""


KUBELET = Profile()
"""Exactly as the kubelet (v1.36.3) decides, its known faults included: for predictions."""

BEST = Profile(**{name: not value for name, value in msgspec.structs.asdict(KUBELET).items()})
"""For admissions that topoalign decides itself."""

PROFILES: Mapping[Mode, Profile] = {Mode.KUBELET: KUBELET, Mode.BEST: BEST}


def profile_of(mode: Mode) -> Profile:
    """Returns the profile of a mode."""
    return PROFILES[mode]
